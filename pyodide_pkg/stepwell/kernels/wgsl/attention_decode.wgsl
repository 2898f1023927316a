// Attention of one row, for GPUs: a workgroup per (share of the positions, kv head), which goes through its tiles of
// CHUNK positions, every SHARES-th. LANES threads share the score of a position; then a thread per (part of the
// positions, vec4 of the head) weighs the values. The GROUP query heads of a kv head share every load of K and V, and all
// loads of a tile are under way before the first is waited for.
//
// Per share and head: the sum of exp(score - maximum) * v, and (maximum, sum of exp(score - maximum)). There are at most
// MOST shares, so that what puts them together (matvec.wgsl) has little to read however long the sequence is.
{% import "kv.wgsl" as kv %}
{% import "reduce.wgsl" as reduce %}
{{ reduce.enable(subgroup) }}
{% include "step.wgsl" %}
{% set d4 = head_dim // 4 %}
{% set group_size = heads // kv_heads %}
{% set parts = threads // d4 %}
{% set per_lane = d4 // lanes %}
{% set at_once = threads // lanes %}
{% set turns = (chunk + at_once - 1) // at_once %}
{% set rounds = (chunk + parts - 1) // parts %}
@group(0) @binding(1) var<storage, read> q: array<vec4f>;                // [heads * head_dim]
@group(0) @binding(2) var<storage, read_write> partials: array<vec4f>;   // [share][heads][head_dim]
@group(0) @binding(3) var<storage, read_write> normals: array<vec2f>;    // [share][heads]: maximum, sum
{{ kv.declare(slabs, half, 4, "read", 4, 4, slabs) }}
{{ kv.chunks(slabs, column, chunk) }}

const KV = {{ kv_heads * d4 }}u;
const CHUNK = {{ chunk }}u;
const D4 = {{ d4 }}u;
const LANES = {{ lanes }}u;
const PARTS = {{ parts }}u;
const GROUP = {{ group_size }}u;
var<workgroup> scores: array<array<array<f32, CHUNK>, GROUP>, 2>;  // a tile's, while the one before is in use
var<workgroup> values: array<array<vec4f, {{ parts * d4 }}>, {{ group_size if together else 1 }}>;

@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) group: vec3u, {{ reduce.parameters(subgroup) }}) {
  let thread = {{ reduce.thread(subgroup) }};
  {{ kv.shares(slabs, column, chunk, most) | trim | indent(2) }}
  if (group.x >= shares) { return; }
  let tiles = {{ kv.end_chunk(slabs, column, chunk) }};
{% if slabs %}
  let first = {{ kv.first_chunk(slabs, column) }} + (group.x + shares - {{ kv.first_chunk(slabs, column) }} % shares) % shares;
  if (first >= tiles) { return; }  // none of them is here
{% else %}
  let first = group.x;
{% endif %}
  let column = thread % D4;
  let part = thread / D4;
  let head = group.y * GROUP;
{% for g in range(group_size) %}
{% for j in range(per_lane) %}
  let q{{ g }}_{{ j }} = q[head * D4 + thread % LANES + {{ g * d4 + j * lanes }}u];
{% endfor %}
  var top{{ g }} = -1e30;
  var sum{{ g }} = 0.0;
  var value{{ g }} = vec4f(0.0);
{% endfor %}
  var turn = 0u;
  let to = (group.x * {{ heads }}u + head) * D4;
{% if slabs %}
  if (first >= shares) {  // a launch for earlier slabs has begun: it goes on from there
{% for g in range(group_size) %}
    top{{ g }} = normals[group.x * {{ heads }}u + head + {{ g }}u].x;
    sum{{ g }} = normals[group.x * {{ heads }}u + head + {{ g }}u].y;
    if (part == 0u) { value{{ g }} = partials[to + {{ g }}u * D4 + column]; }
{% endfor %}
    storageBarrier();
  }
{% endif %}
  for (var tile = first; tile < tiles; tile += shares) {
    let chunk = chunk_of(tile);
    let begin = chunk.begin;
{% if slabs %}
    if (begin >= step.length) { continue; }  // room for more
{% endif %}
    let count = min(chunk.end, step.length) - begin;
{% if window %}
    let hidden = max(begin, step.length - min(step.length, {{ window }}u)) - begin;
    if (hidden >= count) { continue; }  // no position is in sight any more
{% endif %}
    let last = begin + count - 1u;
{% for t in range(turns) %}
    let k_at{{ t }} = (min(begin + thread / LANES + {{ t * at_once }}u, last) + chunk.k) * KV + group.y * D4 + thread % LANES;
{% for j in range(per_lane) %}
    var k_read{{ t }}_{{ j }}: {{ kv.type(half, 4) }};
{% endfor %}
{% endfor %}
{% for r in range(rounds) %}
    var v_read{{ r }}: {{ kv.type(half, 4) }};
{% endfor %}
{% call(k_cache, v_cache) kv.choose(slabs, "chunk.slab") %}
{% for t in range(turns) %}
{% for j in range(per_lane) %}
    k_read{{ t }}_{{ j }} = {{ k_cache }}[k_at{{ t }} + {{ j * lanes }}u];
{% endfor %}
{% endfor %}
{% for r in range(rounds) %}
    v_read{{ r }} = {{ v_cache }}[(min(begin + part + {{ r * parts }}u, last) + chunk.v) * KV + group.y * D4 + column];
{% endfor %}
{% endcall %}
{% for t in range(turns) %}
{% for j in range(per_lane) %}
    let k{{ t }}_{{ j }} = {{ kv.four(half, "k_read%d_%d" % (t, j)) }};
{% endfor %}
{% endfor %}
{% for g in range(group_size) %}
{% for t in range(turns) %}
    var score{{ g }}_{{ t }} = dot({% for j in range(per_lane) %}q{{ g }}_{{ j }} * k{{ t }}_{{ j }}{{ " + " if not loop.last }}{% endfor %}, vec4f({{ head_dim ** -0.5 }}));
{% set ns = namespace(step=1) %}
{% for _ in range(8) if ns.step < lanes %}
    score{{ g }}_{{ t }} += subgroupShuffleXor(score{{ g }}_{{ t }}, {{ ns.step }}u);
{% set ns.step = ns.step * 2 %}
{% endfor %}
{% endfor %}
{% endfor %}
{% for t in range(turns) %}
    let p{{ t }} = thread / LANES + {{ t * at_once }}u;
    if (thread % LANES == 0u && p{{ t }} < CHUNK) {
      let seen = p{{ t }} < count{{ " && p%d >= hidden" % t if window }};
{% for g in range(group_size) %}
      scores[turn][{{ g }}][p{{ t }}] = select(-1e30, score{{ g }}_{{ t }}, seen);
{% endfor %}
    }
{% endfor %}
    workgroupBarrier();
{% for r in range(rounds) %}
    let v{{ r }} = {{ kv.four(half, "v_read%d" % r) }};
{% endfor %}
    // every subgroup finds the maximum and the sum for itself: that takes no further barrier
{% for g in range(group_size) %}
    let before{{ g }} = top{{ g }};
{% if subgroup %}
{% set own = (chunk + subgroup - 1) // subgroup %}
{% for i in range(own) %}
    let own{{ g }}_{{ i }} = {{ "scores[turn][%d][lane + %du]" % (g, i * subgroup) if (i + 1) * subgroup <= chunk else "select(-1e30, scores[turn][%d][min(lane + %du, CHUNK - 1u)], lane + %du < CHUNK)" % (g, i * subgroup, i * subgroup) }};
{% endfor %}
    top{{ g }} = max(top{{ g }}, subgroupMax({% for i in range(own - 1) %}max({% endfor %}own{{ g }}_0{% for i in range(1, own) %}, own{{ g }}_{{ i }}){% endfor %}));
    let more{{ g }} = subgroupAdd({% for i in range(own) %}exp(own{{ g }}_{{ i }} - top{{ g }}){{ " + " if not loop.last }}{% endfor %});
{% else %}
    for (var p = 0u; p < CHUNK; p++) { top{{ g }} = max(top{{ g }}, scores[turn][{{ g }}][p]); }
    var more{{ g }} = 0.0;
    for (var p = 0u; p < CHUNK; p++) { more{{ g }} += exp(scores[turn][{{ g }}][p] - top{{ g }}); }
{% endif %}
    let kept{{ g }} = exp(before{{ g }} - top{{ g }});
    sum{{ g }} = sum{{ g }} * kept{{ g }} + more{{ g }};
    value{{ g }} *= kept{{ g }};
{% for r in range(rounds) %}
{% set last = (r + 1) * parts > chunk %}
{% set place = "part + %du" % (r * parts) %}
    value{{ g }} += v{{ r }} * {{ "select(0.0, exp(scores[turn][%d][min(%s, CHUNK - 1u)] - top%d), %s < CHUNK)" % (g, place, g, place) if last else "exp(scores[turn][%d][%s] - top%d)" % (g, place, g) }};
{% endfor %}
{% endfor %}
    turn = 1u - turn;
  }
{% if together %}
  if (part < PARTS) {
{% for g in range(group_size) %}
    values[{{ g }}][thread] = value{{ g }};
{% endfor %}
  }
  workgroupBarrier();
  for (var i = thread; i < GROUP * D4; i += {{ threads }}u) {
    var all = vec4f(0.0);
    for (var p = 0u; p < PARTS; p++) { all += values[i / D4][p * D4 + i % D4]; }
    partials[to + i] = all;
  }
{% else %}
{% for g in range(group_size) %}
  if (part < PARTS) { values[0][thread] = value{{ g }}; }
  workgroupBarrier();
  if (thread < D4) {
    var all = vec4f(0.0);
    for (var p = 0u; p < PARTS; p++) { all += values[0][p * D4 + thread]; }
    partials[to + {{ g }}u * D4 + thread] = all;
  }
  workgroupBarrier();
{% endfor %}
{% endif %}
  if (thread == 0u) {
{% for g in range(group_size) %}
    normals[group.x * {{ heads }}u + head + {{ g }}u] = vec2f(top{{ g }}, sum{{ g }});
{% endfor %}
  }
}
