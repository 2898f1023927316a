// y[row][n] = sum over k of x[row][k] * W[n][k], for GPUs: many threads, wide coalesced loads.
//
// A workgroup computes WIDE neighbouring outputs for TILE rows of x; its threads split the blocks of k between them
// (thread = split * WIDE + output), and the partial sums meet in workgroup memory. Needs no subgroups.
//
// `mode` plain: y = …; residual: y += …; swiglu: W holds gate rows, then up rows; y = silu(gate) * up.
{% import "formats.wgsl" as formats %}
{% include "step.wgsl" %}
{% set quantised = formats.quantised(format) %}
{% set groups = formats.groups(format) | int or 1 %}
{% set outputs = n // 2 if mode == "swiglu" else n %}
{% set halves = 2 if mode == "swiglu" else 1 %}
{% set assign = {"plain": "=", "residual": "+=", "swiglu": "="}[mode] %}
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
{{ formats.declare(format, 3) }}

const K4 = {{ k // 4 }}u;
const N = {{ n }}u;
const OUTPUTS = {{ outputs }}u;
const BLOCKS = {{ k // 32 }}u;
const WIDE = {{ wide }}u;
const SPLITS = {{ splits }}u;
const TILE = {{ tile }}u;
var<workgroup> partial: array<f32, {{ tile * halves * wide * splits }}>;

@compute @workgroup_size({{ wide * splits }})
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let output = group.x * WIDE + thread % WIDE;
  let row = group.y * TILE;
{% for half in range(halves) %}
{% for t in range(tile) %}
  var total{{ half }}_{{ t }} = 0.0;
{% endfor %}
{% endfor %}
  for (var block = thread / WIDE; block < BLOCKS; block += SPLITS) {
{% for half in range(halves) %}
    let n{{ half }} = min(output, OUTPUTS - 1u){{ " + OUTPUTS" if half }};
    {{ formats.load(format, "w%d" % half, "block", "n%d" % half, "N") | trim | indent(4) }}
{% endfor %}
{% for t in range(tile) %}
    {
      let at = (row + {{ t }}u) * K4 + block * 8u;
{% for g in range(groups) %}
{% for half in range(halves) %}
      var dot{{ half }}_{{ g }} = vec4f(0.0);
{% endfor %}
{% if quantised %}
      var all_{{ g }} = vec4f(0.0);
{% endif %}
{% endfor %}
{% for j in range(8) %}
{% set g = j * groups // 8 %}
      var x{{ j }} = x[at + {{ j }}u];
{% if quantised %}
      all_{{ g }} += x{{ j }};
      x{{ j }} *= {{ formats.factors(format, j) }};
{% endif %}
{% for half in range(halves) %}
      dot{{ half }}_{{ g }} += x{{ j }} * vec4f({% for c in range(4) %}{{ formats.element(format, "w%d" % half, 4 * j + c) }}{{ ", " if not loop.last }}{% endfor %});
{% endfor %}
{% endfor %}
{% for g in range(groups) %}
{% if quantised %}
      let sum_{{ g }} = {{ formats.sum_factor(format) }}dot(all_{{ g }}, vec4f(1.0));
{% endif %}
{% for half in range(halves) %}
{% set product = "dot(dot%d_%d, vec4f(1.0))" % (half, g) %}
{% if quantised %}
      total{{ half }}_{{ t }} += {{ formats.weighed(format, "w%d" % half, g, product, "sum_%d" % g) }};
{% else %}
      total{{ half }}_{{ t }} += {{ product }};
{% endif %}
{% endfor %}
{% endfor %}
    }
{% endfor %}
  }
{% for half in range(halves) %}
{% for t in range(tile) %}
  partial[{{ (half * tile + t) * wide * splits }}u + thread] = total{{ half }}_{{ t }};
{% endfor %}
{% endfor %}
  workgroupBarrier();
  if (thread >= WIDE || output >= OUTPUTS) { return; }
{% for t in range(tile) %}
  if ({{ "row + %du < step.rows" % t if tile > 1 else "true" }}) {
{% for half in range(halves) %}
    var sum{{ half }} = 0.0;
    for (var i = thread; i < {{ wide * splits }}u; i += WIDE) { sum{{ half }} += partial[{{ (half * tile + t) * wide * splits }}u + i]; }
{% endfor %}
    let to = (row + {{ t }}u) * OUTPUTS + output;
{% if mode == "swiglu" %}
    y[to] = sum0 / (1.0 + exp(-sum0)) * sum1;
{% else %}
    y[to] {{ assign }} sum0;
{% endif %}
  }
{% endfor %}
}
