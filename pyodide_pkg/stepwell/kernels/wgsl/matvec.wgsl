// One row of x times W^T, for GPUs: a decode step's products, each with what comes before and after it in one launch.
//
// A workgroup computes WIDE * PER outputs. Its threads are SPLITS sets of WIDE: a set takes every SPLITS-th block of k, a
// thread PER outputs that are WIDE apart. The sums of the sets meet in workgroup memory.
//
// `before`  plain: x as it is; norm: x / rms(x) * weight; merge: x is the chunks of attention_decode, put together
// `after`   plain: y = …; residual: y += …; swiglu: W holds gate rows, then up rows: y = silu(gate) * up;
//           rope: W holds q, k and v rows: pairs of q and k are turned, q goes to y, k and v to the KV cache
{% import "formats.wgsl" as formats %}
{% import "reduce.wgsl" as reduce %}
{{ reduce.enable(subgroup) }}
{% include "step.wgsl" %}
{% set quantised = formats.quantised(format) %}
{% set groups = formats.groups(format) | int or 1 %}
{% set outputs = n // 2 if after == "swiglu" else n %}
{% set halves = 2 if after == "swiglu" else 1 %}
{% set threads = wide * splits %}
{% set staged = before != "plain" %}
{% set extra = 5 if quantised else 4 %}
{% set more = extra + (0 if before == "plain" else 1) %}
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
@group(0) @binding(3) var<storage, read> words: array<vec4u>;
{% if quantised %}
@group(0) @binding(4) var<storage, read> scales: array<{{ formats.scale_type(format) }}>;
{% endif %}
{% if before == "norm" %}
@group(0) @binding({{ extra }}) var<storage, read> weight: array<vec4f>;
{% elif before == "merge" %}
@group(0) @binding({{ extra }}) var<storage, read> normals: array<vec2f>;  // [chunk][head]: maximum, sum
{% endif %}
{% if after == "rope" %}
@group(0) @binding({{ more }}) var<storage, read> turns: array<vec2f>;            // of this step: [pair]
@group(0) @binding({{ more + 1 }}) var<storage, read_write> k_cache: array<vec2f>;   // [position][kv_heads * head_dim]
@group(0) @binding({{ more + 2 }}) var<storage, read_write> v_cache: array<vec2f>;
{% endif %}

const K4 = {{ k // 4 }}u;
const N = {{ n }}u;
const OUTPUTS = {{ outputs }}u;
const BLOCKS = {{ k // 32 }}u;
const WIDE = {{ wide }}u;
const SPLITS = {{ splits }}u;
const THREADS = {{ threads }}u;
{% set sets = threads // subgroup if subgroup and subgroup >= wide else splits %}
var<workgroup> sums: array<f32, {{ sets * wide * per * halves }}>;
{% if staged %}
var<workgroup> xs: array<vec4f, K4>;
{% endif %}
{% if after == "rope" %}
var<workgroup> results: array<f32, {{ wide * per }}>;
{% endif %}
{% if before == "norm" %}
{{ reduce.declare(threads, subgroup) }}
{% endif %}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, {{ reduce.parameters(subgroup) }}) {
  let thread = {{ reduce.thread(subgroup) }};
{% if before == "norm" %}
{% set count = (k // 4 + threads - 1) // threads %}
  var squares = vec4f(0.0);
{% for c in range(count) %}
  let i{{ c }} = min(thread + {{ c * threads }}u, K4 - 1u);
  let x{{ c }} = x[i{{ c }}];
  let weight{{ c }} = weight[i{{ c }}];
  squares += select(vec4f(0.0), x{{ c }} * x{{ c }}, thread + {{ c * threads }}u < K4);
{% endfor %}
  let scale = inverseSqrt(total_of_all(dot(squares, vec4f(1.0)), thread) / f32(K4 * 4u) + {{ eps }});
{% for c in range(count) %}
  if (thread + {{ c * threads }}u < K4) { xs[i{{ c }}] = x{{ c }} * scale * weight{{ c }}; }
{% endfor %}
  workgroupBarrier();
{% elif before == "merge" %}
  let chunks = (step.length + {{ chunk - 1 }}u) / {{ chunk }}u;
  for (var i = thread; i < K4; i += THREADS) {
    let head = i / {{ head_dim // 4 }}u;
    var top = normals[head].x;
    for (var c = 1u; c < chunks; c++) { top = max(top, normals[c * {{ heads }}u + head].x); }
    var sum = 0.0;
    var value = vec4f(0.0);
    for (var c = 0u; c < chunks; c++) {
      let normal = normals[c * {{ heads }}u + head];
      let part = exp(normal.x - top);
      sum += normal.y * part;
      value += x[c * K4 + i] * part;
    }
    xs[i] = value / sum;
  }
  workgroupBarrier();
{% endif %}
  let first = group.x * {{ wide * per }}u + thread % WIDE;
{% for r in range(per) %}
{% for half in range(halves) %}
  let n{{ r }}_{{ half }} = min(first + {{ r * wide }}u, OUTPUTS - 1u){{ " + OUTPUTS" if half }};
  var total{{ r }}_{{ half }} = 0.0;
{% endfor %}
{% endfor %}
  for (var block = thread / WIDE; block < BLOCKS; block += SPLITS) {
{% for r in range(per) %}
{% for half in range(halves) %}
    {{ formats.load(format, "w%d_%d" % (r, half), "block", "n%d_%d" % (r, half), "N") | trim | indent(4) }}
{% endfor %}
{% endfor %}
{% for j in range(8) %}
    var x{{ j }} = {{ "xs" if staged else "x" }}[block * 8u + {{ j }}u];
{% endfor %}
{% if quantised %}
{% for g in range(groups) %}
    let sum_{{ g }} = {{ formats.sum_factor(format) }}dot({% for j in range(g * 8 // groups, (g + 1) * 8 // groups) %}x{{ j }}{{ " + " if not loop.last }}{% endfor %}, vec4f(1.0));
{% endfor %}
{% for j in range(8) %}
    x{{ j }} *= {{ formats.factors(format, j) }};
{% endfor %}
{% endif %}
{% for r in range(per) %}
{% for half in range(halves) %}
{% set w = "w%d_%d" % (r, half) %}
    {
{% for g in range(groups) %}
      var dot{{ g }} = vec4f(0.0);
{% endfor %}
{% for j in range(8) %}
      dot{{ j * groups // 8 }} += x{{ j }} * vec4f({% for c in range(4) %}{{ formats.element(format, w, 4 * j + c) }}{{ ", " if not loop.last }}{% endfor %});
{% endfor %}
{% for g in range(groups) %}
{% set product = "dot(dot%d, vec4f(1.0))" % g %}
      total{{ r }}_{{ half }} += {{ formats.weighed(format, w, g, product, "sum_%d" % g) if quantised else product }};
{% endfor %}
    }
{% endfor %}
{% endfor %}
  }
{% for r in range(per) %}
{% for half in range(halves) %}
{% set at = (half * per + r) * wide * sets %}
{% if subgroup and subgroup >= wide %}
{% set ns = namespace(step=wide) %}
{% for _ in range(8) if ns.step < subgroup %}
  total{{ r }}_{{ half }} += subgroupShuffleXor(total{{ r }}_{{ half }}, {{ ns.step }}u);
{% set ns.step = ns.step * 2 %}
{% endfor %}
  if (lane < WIDE) { sums[{{ at }}u + subgroup * WIDE + lane] = total{{ r }}_{{ half }}; }
{% else %}
  sums[{{ at }}u + thread] = total{{ r }}_{{ half }};
{% endif %}
{% endfor %}
{% endfor %}
  workgroupBarrier();
  // one thread per output of the workgroup: output = thread, of the set of `thread % WIDE` and row `thread / WIDE`
  let output = group.x * {{ wide * per }}u + thread;
{% for half in range(halves) %}
  var sum{{ half }} = 0.0;
{% endfor %}
  if (thread < {{ wide * per }}u) {
    let from_ = thread / WIDE * {{ wide * sets }}u + thread % WIDE;
{% for half in range(halves) %}
{% for i in range(sets) %}
    sum{{ half }} += sums[{{ half * per * wide * sets + i * wide }}u + from_];
{% endfor %}
{% endfor %}
{% if after == "plain" %}
    if (output < OUTPUTS) { y[output] = sum0; }
{% elif after == "residual" %}
    if (output < OUTPUTS) { y[output] += sum0; }
{% elif after == "swiglu" %}
    if (output < OUTPUTS) { y[output] = sum0 / (1.0 + exp(-sum0)) * sum1; }
{% else %}
    results[thread] = sum0;
{% endif %}
  }
{% if after == "rope" %}
  workgroupBarrier();
  let pair_at = group.x * {{ wide * per // 2 }}u + thread;
  if (thread >= {{ wide * per // 2 }}u || pair_at >= OUTPUTS / 2u) { return; }
  let pair = vec2f(results[2u * thread], results[2u * thread + 1u]);
  const Q = {{ heads * head_dim // 2 }}u;
  const KV = {{ kv_heads * head_dim // 2 }}u;
  var turned = pair;
  let index = pair_at % {{ head_dim // 2 }}u;
  if (index < {{ rope_dim // 2 }}u) {
    let turn = turns[index];
    turned = vec2f(pair.x * turn.x - pair.y * turn.y, pair.x * turn.y + pair.y * turn.x);
  }
  if (pair_at < Q) {
    y[2u * pair_at] = turned.x;
    y[2u * pair_at + 1u] = turned.y;
  } else if (pair_at < Q + KV) {
    k_cache[step.position * KV + pair_at - Q] = turned;
  } else {
    v_cache[step.position * KV + pair_at - Q - KV] = pair;
  }
{% endif %}
}
