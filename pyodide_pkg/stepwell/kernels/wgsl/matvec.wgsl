// One row of x times W^T, for GPUs: a decode step's products, each with what comes before and after it in one launch.
//
// A workgroup computes WIDE * PER outputs. Its threads are SPLITS sets of WIDE: a set takes every SPLITS-th block of k, a
// thread PER outputs that are WIDE apart. The sums of the sets meet in workgroup memory. A thread's first AHEAD blocks are
// read before x is prepared: memory is busy while the workgroup waits for itself.
//
// `before`  plain: x as it is; norm: x / rms(x) * weight; merge: x is the shares of attention_decode, put together
// `after`   plain: y = …; residual: y += …; swiglu: W holds gate rows, then up rows: y = silu(gate) * up;
//           rope: W holds q, k and v rows: pairs of q and k are turned, q goes to y, k and v to the KV cache
// `arithmetic`  f32; dot4: in integers, four products an instruction (quantise.wgsl)
{% import "formats.wgsl" as formats %}
{% import "quantise.wgsl" as quantise %}
{% import "kv.wgsl" as kv %}
{% import "reduce.wgsl" as reduce %}
{% import "shares.wgsl" as shares_of %}
{{ reduce.enable(subgroup) }}
{% include "step.wgsl" %}
{% set quantised = formats.quantised(format) %}
{% set groups = formats.groups(format) | int or 1 %}
{% set outputs = n // 2 if after == "swiglu" else n %}
{% set halves = 2 if after == "swiglu" else 1 %}
{% set threads = wide * splits %}
{% if before == "merge" %}
{% set teams = [1, [teams, threads // (k // 8)] | min] | max %}
{% endif %}
{% set blocks = k // 32 %}
{% set dot4 = arithmetic == "dot4" %}
{% set staged = dot4 or before != "plain" %}
{% set extra = 5 if quantised else 4 %}
{% set more = extra + (0 if before == "plain" else 1) %}
@group(0) @binding(1) var<storage, read> x: array<vec4f>;
@group(0) @binding(2) var<storage, read_write> y: array<f32>;
{{ formats.declare(format, 3) }}
{% if before == "norm" %}
@group(0) @binding({{ extra }}) var<storage, read> weight: array<vec4f>;
{% elif before == "merge" %}
@group(0) @binding({{ extra }}) var<storage, read> normals: array<vec2f>;  // [share][head]: maximum, sum
{% if slabs %}
@group(0) @binding({{ more }}) var<uniform> pages: array<vec4u, {{ slabs + 1 }}>;  // see kv.wgsl
{% endif %}
{% endif %}
{% if after == "rope" %}
@group(0) @binding({{ more }}) var<storage, read> turns: array<vec2f>;            // of this step: [pair]
{{ kv.declare(slabs, half, more + 1, "read_write", 2, 2, 1) }}
{{ kv.rows(slabs) }}
{% endif %}

const K4 = {{ k // 4 }}u;
const N = {{ n }}u;
const OUTPUTS = {{ outputs }}u;
const BLOCKS = {{ blocks }}u;
const WIDE = {{ wide }}u;
const SPLITS = {{ splits }}u;
const THREADS = {{ threads }}u;
{# sets of threads that have blocks; the others help before #}
{% set unit = [1, subgroup // wide] | max %}
{% set at_work = [splits, (blocks + unit - 1) // unit * unit] | min %}
{% set sets = at_work * wide // subgroup if subgroup and subgroup >= wide else at_work %}
var<workgroup> sums: array<f32, {{ sets * wide * per * halves }}>;
{% if dot4 %}
{{ quantise.declare(blocks) }}
{% elif staged %}
var<workgroup> xs: array<vec4f, K4>;
{% endif %}
{% if after == "rope" %}
var<workgroup> results: array<f32, {{ wide * per }}>;
{% endif %}
{% if before == "norm" %}
{{ reduce.declare(threads, subgroup) }}
{% elif before == "merge" %}
{{ shares_of.functions(teams, k // 8) }}
{% endif %}

{# Read what a thread has of block a of its set: row r, half 0 or 1 of swiglu. With `again` into variables that were
   declared. #}
{% macro fetch(a, block, again=false) %}
{% for r in range(per) %}
{% for half in range(halves) %}
{% set what = ("w%d_%d_%d" % (a, r, half), block, "n%d_%d" % (r, half), "N") %}
{{ (formats.refill(format, *what) if again else formats.fetch(format, *what)) | trim }}
{% endfor %}
{% endfor %}
{% endmacro %}

{# Which block of the row is block a of its set; the last one where the row has fewer. #}
{% macro place(a) -%}
{{ "set_ + %du" % (a * splits) if (a + 1) * splits <= blocks else "min(set_ + %du, BLOCKS - 1u)" % (a * splits) }}
{%- endmacro %}

{# Add what block a of its set, number `block` of the row, contributes. #}
{% macro add(a, block) %}
{% if dot4 %}
{{ quantise.take(block, groups) | trim }}
{% else %}
{% for j in range(8) %}
var x{{ j }} = {{ "xs" if staged else "x" }}[{{ block }} * 8u + {{ j }}u];
{% endfor %}
{% if quantised %}
{% for g in range(groups) %}
let sum_{{ g }} = {{ formats.sum_factor(format) }}dot({% for j in range(g * 8 // groups, (g + 1) * 8 // groups) %}x{{ j }}{{ " + " if not loop.last }}{% endfor %}, vec4f(1.0));
{% endfor %}
{% for j in range(8) %}
x{{ j }} *= {{ formats.factors(format, j) }};
{% endfor %}
{% endif %}
{% endif %}
{% for r in range(per) %}
{% for half in range(halves) %}
{% set w = "w%d_%d_%d" % (a, r, half) %}
{
  {{ formats.unpack(format, w) | trim | indent(2) }}
{% if dot4 %}
  {{ quantise.sums(format, w) | trim | indent(2) }}
  total{{ r }}_{{ half }} += {{ quantise.product(format, w, formats) }};
{% else %}
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
{% endif %}
}
{% endfor %}
{% endfor %}
{% endmacro %}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, {{ reduce.parameters(subgroup) }}) {
  let thread = {{ reduce.thread(subgroup) }};
{# x, eight values a thread and turn: e0_c, e1_c #}
{% set octets = k // 8 %}
{% set turns_of_x = (octets + threads - 1) // threads %}
{% if before == "merge" %}
  {{ kv.shares(slabs, column, chunk, most) | trim | indent(2) }}
{% endif %}
{% if staged %}
{% for c in range(turns_of_x) %}
{% if before == "merge" and teams > 1 %}
  let i0 = thread % {{ octets }}u;
  let team = thread / {{ octets }}u;  // those of an octet share the shares
{% else %}
  let i{{ c }} = min(thread + {{ c * threads }}u, {{ octets - 1 }}u);
{% endif %}
{% if before == "merge" %}
  {{ shares_of.read("i%d" % c, "4u * team" if teams > 1 else "0u", "first%d_" % c, heads, head_dim) | trim | indent(2) }}
{% else %}
  let x0_{{ c }} = x[2u * i{{ c }}];
  let x1_{{ c }} = x[2u * i{{ c }} + 1u];
{% endif %}
{% if before == "norm" %}
  let weight0_{{ c }} = weight[2u * i{{ c }}];
  let weight1_{{ c }} = weight[2u * i{{ c }} + 1u];
{% endif %}
{% endfor %}
{% endif %}
  let first = group.x * {{ wide * per }}u + thread % WIDE;
{% for r in range(per) %}
{% for half in range(halves) %}
  let n{{ r }}_{{ half }} = min(first + {{ r * wide }}u, OUTPUTS - 1u){{ " + OUTPUTS" if half }};
  var total{{ r }}_{{ half }} = 0.0;
{% endfor %}
{% endfor %}
  // one thread per output of the workgroup: output = thread, of the set of `thread % WIDE` and row `thread / WIDE`
  let output = group.x * {{ wide * per }}u + thread;
{% if after == "residual" %}
  var sum_before = 0.0;
  if (thread < {{ wide * per }}u) { sum_before = y[min(output, OUTPUTS - 1u)]; }
{% elif after == "rope" %}
  let pair_at = group.x * {{ wide * per // 2 }}u + thread;
  let index = pair_at % {{ head_dim // 2 }}u;
  let turn = turns[min(index, {{ rope_dim // 2 - 1 }}u)];
{% endif %}
{# Blocks of a thread: `early` of them are under way at any time. Where there are few, each has names of its own. #}
{% set count = (blocks + splits - 1) // splits %}
{% set early = [[1, ahead] | max, count] | min %}
{% set unrolled = count * per * halves <= 16 %}
  let set_ = thread / WIDE;
{% for a in range(early) %}
  let b{{ a }} = {{ place(a) }};
{% if not unrolled %}
{% for r in range(per) %}
{% for half in range(halves) %}
  {{ formats.hold(format, "w%d_%d_%d" % (a, r, half)) | trim | indent(2) }}
{% endfor %}
{% endfor %}
{% endif %}
  {{ fetch(a, "b%d" % a, not unrolled) | trim | indent(2) }}
{% endfor %}
{% if before == "norm" %}
  // rms is a factor of all results: it can wait until they are there
  var squares = vec4f(0.0);
{% for c in range(turns_of_x) %}
  squares += select(vec4f(0.0), x0_{{ c }} * x0_{{ c }} + x1_{{ c }} * x1_{{ c }}, thread + {{ c * threads }}u < {{ octets }}u);
{% endfor %}
{% if subgroup %}
  let own_squares = subgroupAdd(dot(squares, vec4f(1.0)));
  if (lane == 0u) { reduced[subgroup] = own_squares; }
{% else %}
  let all_squares = total_of_all(dot(squares, vec4f(1.0)), thread);
{% endif %}
{% endif %}
{% if staged %}
{% for c in range(turns_of_x) %}
{% if before == "norm" %}
  let e0_{{ c }} = x0_{{ c }} * weight0_{{ c }};
  let e1_{{ c }} = x1_{{ c }} * weight1_{{ c }};
{% elif before == "merge" %}
  {{ shares_of.merged("merged%d" % c, "i%d" % c, "first%d_" % c, teams, octets, heads, head_dim) | trim | indent(2) }}
  let e0_{{ c }} = merged{{ c }}.e0 / merged{{ c }}.sum;
  let e1_{{ c }} = merged{{ c }}.e1 / merged{{ c }}.sum;
{% else %}
  let e0_{{ c }} = x0_{{ c }};
  let e1_{{ c }} = x1_{{ c }};
{% endif %}
{% if dot4 %}
  quantise(i{{ c }}, e0_{{ c }}, e1_{{ c }}, thread + {{ c * threads }}u < {{ octets }}u);
{% else %}
  if (thread + {{ c * threads }}u < {{ octets }}u) {
    xs[2u * i{{ c }}] = e0_{{ c }};
    xs[2u * i{{ c }} + 1u] = e1_{{ c }};
  }
{% endif %}
{% endfor %}
  workgroupBarrier();
{% endif %}
{% if unrolled %}
{% for a in range(count) %}
{% set next = a + early %}
{% if next < count %}
  let b{{ next }} = {{ place(next) }};
  {{ fetch(next, "b%d" % next) | trim | indent(2) }}
{% endif %}
  {{ "{" if (a + 1) * splits <= blocks else "if (set_ + %du < BLOCKS) {" % (a * splits) }}
    {{ add(a, "b%d" % a) | trim | indent(4) }}
  }
{% endfor %}
{% else %}
  for (var block = set_; block < BLOCKS; block += {{ early * splits }}u) {
{% for a in range(early) %}
    if (block + {{ a * splits }}u < BLOCKS) {
      let now{{ a }} = block + {{ a * splits }}u;
      {{ add(a, "now%d" % a) | trim | indent(6) }}
      let next{{ a }} = min(block + {{ (a + early) * splits }}u, BLOCKS - 1u);
      {{ fetch(a, "next%d" % a, true) | trim | indent(6) }}
    }
{% endfor %}
  }
{% endif %}
{% for r in range(per) %}
{% for half in range(halves) %}
{% set at = (half * per + r) * wide * sets %}
{% if subgroup and subgroup >= wide %}
{% set ns = namespace(step=wide) %}
{% for _ in range(8) if ns.step < subgroup %}
  total{{ r }}_{{ half }} += subgroupShuffleXor(total{{ r }}_{{ half }}, {{ ns.step }}u);
{% set ns.step = ns.step * 2 %}
{% endfor %}
  if (lane < WIDE{{ " && subgroup < %du" % sets if at_work < splits }}) { sums[{{ at }}u + subgroup * WIDE + lane] = total{{ r }}_{{ half }}; }
{% else %}
  {{ "if (thread < %du) { " % (at_work * wide) if at_work < splits }}sums[{{ at }}u + thread] = total{{ r }}_{{ half }};{{ " }" if at_work < splits }}
{% endif %}
{% endfor %}
{% endfor %}
  workgroupBarrier();
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
{% if before == "norm" %}
{% if subgroup %}
    var all_squares = reduced[0];
{% for i in range(1, threads // subgroup) %}
    all_squares += reduced[{{ i }}];
{% endfor %}
{% endif %}
    let rms = inverseSqrt(all_squares / f32(K4 * 4u) + {{ eps }});
{% for half in range(halves) %}
    sum{{ half }} *= rms;
{% endfor %}
{% endif %}
{% if after == "plain" %}
    if (output < OUTPUTS) { y[output] = sum0; }
{% elif after == "residual" %}
    if (output < OUTPUTS) { y[output] = sum_before + sum0; }
{% elif after == "swiglu" %}
    if (output < OUTPUTS) { y[output] = sum0 / (1.0 + exp(-sum0)) * sum1; }
{% else %}
    results[thread] = sum0;
{% endif %}
  }
{% if after == "rope" %}
  workgroupBarrier();
  if (thread >= {{ wide * per // 2 }}u || pair_at >= OUTPUTS / 2u) { return; }
  let pair = vec2f(results[2u * thread], results[2u * thread + 1u]);
  const Q = {{ heads * head_dim // 2 }}u;
  const KV = {{ kv_heads * head_dim // 2 }}u;
  var turned = pair;
  if (index < {{ rope_dim // 2 }}u) {
    turned = vec2f(pair.x * turn.x - pair.y * turn.y, pair.x * turn.y + pair.y * turn.x);
  }
  if (pair_at < Q) {
    y[2u * pair_at] = turned.x;
    y[2u * pair_at + 1u] = turned.y;
  } else if (pair_at < Q + KV) {
    {{ kv.k(slabs) }}[rows_of(step.position).x * KV + pair_at - Q] = {{ kv.pair(half, "turned") }};
  } else {
    {{ kv.v(slabs) }}[rows_of(step.position).y * KV + pair_at - Q - KV] = {{ kv.pair(half, "pair") }};
  }
{% endif %}
}
