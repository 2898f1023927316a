// Partial attention of one chunk of positions, for GPUs: one workgroup per (chunk, kv head, row), one thread per position
// of the chunk for the scores, then one per dimension for the values. The GROUP query heads of a kv head share the loads.
//
// Per row, chunk and head: partial = sum of exp(score - max) * v, and (max, sum of exp(score - max)).
{% import "kv.wgsl" as kv %}
{% include "step.wgsl" %}
{% set d4 = head_dim // 4 %}
{% set group_size = heads // kv_heads %}
@group(0) @binding(1) var<storage, read> qkv: array<vec4f>;              // [row][(heads + 2 kv_heads) * head_dim]
@group(0) @binding(2) var<storage, read_write> partials: array<f32>;     // [chunk][row][heads][head_dim]
@group(0) @binding(3) var<storage, read_write> normals: array<vec2f>;    // [chunk][row][heads]: maximum, sum
{{ kv.declare(slabs, half, 4, "read", 4, 1, slabs) }}
{{ kv.chunks(slabs, column, chunk) }}

const ROW = {{ (heads + 2 * kv_heads) * d4 }}u;
const KV = {{ kv_heads * d4 }}u;
const CHUNK = {{ chunk }}u;
const GROUP = {{ group_size }}u;
var<workgroup> weights: array<array<f32, CHUNK>, GROUP>;

@compute @workgroup_size(CHUNK)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) thread: u32) {
  let kv_head = group.y;
  let row = group.z;
  let length = step.position + row + 1u;  // causal: a row sees itself and what is before it
  let number = {{ kv.first_chunk(slabs, column) }} + group.x;
  let chunk = chunk_of(number);
  let end = min(chunk.end, length);
{% if window %}
  let begin = max(chunk.begin, length - min(length, {{ window }}u));  // what is before it is out of the window
{% else %}
  let begin = chunk.begin;
{% endif %}
  let count = select(0u, end - begin, begin < end);
  let k_at = (min(begin + thread, max(end, chunk.begin + 1u) - 1u) + chunk.k) * KV + kv_head * {{ d4 }}u;
  let q_at = row * ROW + kv_head * GROUP * {{ d4 }}u;
{% for g in range(group_size) %}
  var score{{ g }} = vec4f(0.0);
{% endfor %}
{% call(k_cache, v_cache) kv.choose(slabs, "chunk.slab") %}
  for (var j = 0u; j < {{ d4 }}u; j++) {
    let k = {{ kv.four(half, "%s[k_at + j]" % k_cache) }};
{% for g in range(group_size) %}
    score{{ g }} += k * qkv[q_at + {{ g * d4 }}u + j];
{% endfor %}
  }
{% endcall %}
{% for g in range(group_size) %}
  weights[{{ g }}][thread] = dot(score{{ g }}, vec4f({{ head_dim ** -0.5 }}));
{% endfor %}
  workgroupBarrier();
{% for g in range(group_size) %}
  {
    let at = (number * groups.z + row) * {{ heads }}u + kv_head * GROUP + {{ g }}u;
    var highest = -1e30;
    for (var i = 0u; i < count; i++) { highest = max(highest, weights[{{ g }}][i]); }
    for (var d = thread; d < {{ head_dim }}u; d += CHUNK) {
      var value = 0.0;
      var sum = 0.0;
{% call(k_cache, v_cache) kv.choose(slabs, "chunk.slab") %}
      for (var i = 0u; i < count; i++) {
        let weight = exp(weights[{{ g }}][i] - highest);
        sum += weight;
        let v_at = (begin + i + chunk.v) * KV * 4u + kv_head * {{ head_dim }}u + d;
        value += weight * {{ kv.number(slabs, half, v_cache, "v_at") }};
      }
{% endcall %}
      partials[at * {{ head_dim }}u + d] = value;
      if (d == 0u) { normals[at] = vec2f(highest, sum); }
    }
  }
{% endfor %}
}
