// y[row][n] = sum over k of x[row][k] * W[n][k], for CPU adapters: their unit of cost is the 32-bit load.
//
// A workgroup is four threads, one SIMD lane each. A thread owns PER outputs, four apart, and TILE rows of x: each weight
// is loaded once per tile, and each x by one lane only, which hands it to the others (with `subgroups`).
//
// `mode` plain: y = …; residual: y += …; swiglu: W holds gate rows, then up rows; y = silu(gate) * up.
{% if subgroups %}
enable subgroups;
{% endif %}
{% import "formats.wgsl" as formats %}
{% include "step.wgsl" %}
{% set vectors = formats.vectors(format) | int %}
{% set quantised = formats.quantised(format) %}
{% set outputs = n // 2 if mode == "swiglu" else n %}
{% set halves = 2 if mode == "swiglu" else 1 %}
{% set assign = {"plain": "=", "residual": "+=", "swiglu": "="}[mode] %}
{% set whole = outputs % (4 * per) == 0 %}
{# arrays of constant size have cheaper bounds checks; with several rows the size is not known #}
@group(0) @binding(1) var<storage, read> x: array<vec4f{{ ", %d" % (k // 4) if tile == 1 }}>;
@group(0) @binding(2) var<storage, read_write> y: array<f32{{ ", %d" % outputs if tile == 1 }}>;
@group(0) @binding(3) var<storage, read> words: array<vec4u, {{ k // 32 * vectors * n }}>;
{% if quantised %}
@group(0) @binding(4) var<storage, read> scales: array<vec2f, {{ k // 32 * n }}>;
{% endif %}

const K4 = {{ k // 4 }}u;
const N = {{ n }}u;
const OUTPUTS = {{ outputs }}u;
const BLOCKS = {{ k // 32 }}u;

@compute @workgroup_size(4)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) lane: u32) {
  let first = group.x * {{ 4 * per }}u + lane;
  let row = group.y * {{ tile }}u;
{% for r in range(per) %}
{% for half in range(halves) %}
  let n{{ r }}_{{ half }} = {{ "min(first + %du, OUTPUTS - 1u)" % (4 * r) if not whole else "first + %du" % (4 * r) }}{{ " + OUTPUTS" if half }};
{% for t in range(tile) %}
  var total{{ r }}_{{ half }}_{{ t }} = 0.0;
{% endfor %}
{% endfor %}
{% endfor %}
{% if subgroups and quantised %}
  let factors = select({{ formats.factors(format, 0) }}, {{ formats.factors(format, 1) }}, lane % 2u == 1u);
{% endif %}
  for (var block = 0u; block < BLOCKS; block++) {
{% for t in range(tile) %}
    let at{{ t }} = (row + {{ t }}u) * K4 + block * 8u;
{% if subgroups %}
    var a{{ t }} = x[at{{ t }} + lane];
    var b{{ t }} = x[at{{ t }} + 4u + lane];
{% if quantised %}
    let sum{{ t }} = subgroupAdd(dot(a{{ t }} + b{{ t }}, vec4f(1.0)));
    a{{ t }} *= factors;
    b{{ t }} *= factors;
{% endif %}
{% else %}
{% for j in range(8) %}
    {{ "var" if quantised else "let" }} v{{ t }}_{{ j }} = x[at{{ t }} + {{ j }}u];
{% endfor %}
{% if quantised %}
    let sum{{ t }} = dot({% for j in range(8) %}v{{ t }}_{{ j }}{{ " + " if not loop.last }}{% endfor %}, vec4f(1.0));
{% for j in range(8) %}
    v{{ t }}_{{ j }} *= {{ formats.factors(format, j) }};
{% endfor %}
{% endif %}
{% endif %}
{% for k in range(32) %}
{% set component = "xyzw"[k % 4] %}
{% if subgroups %}
    let x{{ t }}_{{ k }} = subgroupBroadcast({{ "a" if k < 16 else "b" }}{{ t }}.{{ component }}, {{ k // 4 % 4 }}u);
{% else %}
    let x{{ t }}_{{ k }} = v{{ t }}_{{ k // 4 }}.{{ component }};
{% endif %}
{% endfor %}
{% endfor %}
{% for r in range(per) %}
{% for half in range(halves) %}
    {
      let n = n{{ r }}_{{ half }};
{% for i in range(vectors) %}
      let q{{ i }} = words[(block * {{ vectors }}u + {{ i }}u) * N + n];
{% endfor %}
{% for t in range(tile) %}
      var dot{{ t }} = 0.0;
{% endfor %}
{% for k in range(32) %}
{% if tile == 1 %}
      dot0 += {{ formats.element(format, "q", k) }} * x0_{{ k }};
{% else %}
      let e{{ k }} = {{ formats.element(format, "q", k) }};
{% for t in range(tile) %}
      dot{{ t }} += e{{ k }} * x{{ t }}_{{ k }};
{% endfor %}
{% endif %}
{% endfor %}
{% if quantised %}
      let scale = scales[block * N + n];
{% endif %}
{% for t in range(tile) %}
{% set total = "total%d_%d_%d" % (r, half, t) %}
{% if quantised %}
      {{ total }} += scale.x * dot{{ t }} + scale.y * sum{{ t }};
{% else %}
      {{ total }} += dot{{ t }};
{% endif %}
{% endfor %}
    }
{% endfor %}
{% endfor %}
  }
{% for t in range(tile) %}
{% if tile > 1 %}
  if (row + {{ t }}u < step.rows) {
{% else %}
  {
{% endif %}
    let to = (row + {{ t }}u) * OUTPUTS + first;
{% for r in range(per) %}
{% set value = "total%d_0_%d" % (r, t) %}
{% if mode == "swiglu" %}
{% set value = "%s / (1.0 + exp(-%s)) * total%d_1_%d" % (value, value, r, t) %}
{% endif %}
    {% if not whole %}if (first + {{ 4 * r }}u < OUTPUTS) { {% endif %}y[to + {{ 4 * r }}u] {{ assign }} {{ value }};{{ " }" if not whole }}
{% endfor %}
  }
{% endfor %}
}
