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
{% set groups = formats.groups(format) | int or 1 %}
{% set outputs = n // 2 if mode == "swiglu" else n %}
{% set halves = 2 if mode == "swiglu" else 1 %}
{% set assign = {"plain": "=", "residual": "+=", "swiglu": "="}[mode] %}
{% set whole = outputs % (4 * per) == 0 %}
{# arrays of constant size have cheaper bounds checks; with several rows the size is not known #}
@group(0) @binding(1) var<storage, read> x: array<vec4f{{ ", %d" % (k // 4) if tile == 1 }}>;
@group(0) @binding(2) var<storage, read_write> y: array<f32{{ ", %d" % outputs if tile == 1 }}>;
@group(0) @binding(3) var<storage, read> words: array<vec4u, {{ k // 32 * vectors * n }}>;
{% if quantised %}
@group(0) @binding(4) var<storage, read> scales: array<{{ formats.scale_type(format) }}, {{ k // 32 * formats.scale_vectors(format) | int * n }}>;
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
{% for part in (["a%d + b%d" % (t, t)] if groups == 1 else ["a%d" % t, "b%d" % t]) %}
    let sum{{ t }}_{{ loop.index0 }} = {{ formats.sum_factor(format) }}subgroupAdd(dot({{ part }}, vec4f(1.0)));
{% endfor %}
    a{{ t }} *= factors;
    b{{ t }} *= factors;
{% endif %}
{% else %}
{% for j in range(8) %}
    {{ "var" if quantised else "let" }} v{{ t }}_{{ j }} = x[at{{ t }} + {{ j }}u];
{% endfor %}
{% if quantised %}
{% for part in range(8) | batch(8 // groups) %}
    let sum{{ t }}_{{ loop.index0 }} = {{ formats.sum_factor(format) }}dot({% for j in part %}v{{ t }}_{{ j }}{{ " + " if not loop.last }}{% endfor %}, vec4f(1.0));
{% endfor %}
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
      {{ formats.load(format, "q", "block", "n", "N") | trim | indent(6) }}
{% for t in range(tile) %}
{% for g in range(groups) %}
      var dot{{ t }}_{{ g }} = 0.0;
{% endfor %}
{% endfor %}
{% for k in range(32) %}
{% set g = k * groups // 32 %}
{% if tile == 1 %}
      dot0_{{ g }} += {{ formats.element(format, "q", k) }} * x0_{{ k }};
{% else %}
      let e{{ k }} = {{ formats.element(format, "q", k) }};
{% for t in range(tile) %}
      dot{{ t }}_{{ g }} += e{{ k }} * x{{ t }}_{{ k }};
{% endfor %}
{% endif %}
{% endfor %}
{% for t in range(tile) %}
{% set total = "total%d_%d_%d" % (r, half, t) %}
{% if quantised %}
{% for g in range(groups) %}
      {{ total }} += {{ formats.weighed(format, "q", g, "dot%d_%d" % (t, g), "sum%d_%d" % (t, g)) }};
{% endfor %}
{% else %}
      {{ total }} += dot{{ t }}_0;
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
