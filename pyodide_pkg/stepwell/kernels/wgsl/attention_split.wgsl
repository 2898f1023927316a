// Partial attention of one chunk of positions, for GPUs: one workgroup per (chunk, kv head, row), one thread per position
// of the chunk for the scores, then one per dimension for the values. The GROUP query heads of a kv head share the loads.
//
// Per row, chunk and head: partial = sum of exp(score - max) * v, and (max, sum of exp(score - max)).
{% include "step.wgsl" %}
{% set d4 = head_dim // 4 %}
{% set group_size = heads // kv_heads %}
@group(0) @binding(1) var<storage, read> qkv: array<vec4f>;              // [row][(heads + 2 kv_heads) * head_dim]
@group(0) @binding(2) var<storage, read> k_cache: array<vec4f>;          // [position][kv_heads * head_dim]
@group(0) @binding(3) var<storage, read> v_cache: array<f32>;
@group(0) @binding(4) var<storage, read_write> partials: array<f32>;     // [row][chunk][heads][head_dim]
@group(0) @binding(5) var<storage, read_write> normals: array<vec2f>;    // [row][chunk][heads]: maximum, sum

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
{% if window %}
  let first = length - min(length, {{ window }}u);  // what is before it is out of the window
  let begin = max(group.x * CHUNK, first);
  let end = min((group.x + 1u) * CHUNK, length);
{% else %}
  let begin = group.x * CHUNK;
  let end = min(begin + CHUNK, length);
{% endif %}
  let count = select(0u, end - begin, begin < end);
  let k_at = min(begin + thread, length - 1u) * KV + kv_head * {{ d4 }}u;
  let q_at = row * ROW + kv_head * GROUP * {{ d4 }}u;
{% for g in range(group_size) %}
  var score{{ g }} = vec4f(0.0);
{% endfor %}
  for (var j = 0u; j < {{ d4 }}u; j++) {
    let k = k_cache[k_at + j];
{% for g in range(group_size) %}
    score{{ g }} += k * qkv[q_at + {{ g * d4 }}u + j];
{% endfor %}
  }
{% for g in range(group_size) %}
  weights[{{ g }}][thread] = dot(score{{ g }}, vec4f({{ head_dim ** -0.5 }}));
{% endfor %}
  workgroupBarrier();
{% for g in range(group_size) %}
  {
    let at = (row * groups.x + group.x) * {{ heads }}u + kv_head * GROUP + {{ g }}u;
    var highest = -1e30;
    for (var i = 0u; i < count; i++) { highest = max(highest, weights[{{ g }}][i]); }
    for (var d = thread; d < {{ head_dim }}u; d += CHUNK) {
      var value = 0.0;
      var sum = 0.0;
      for (var i = 0u; i < count; i++) {
        let weight = exp(weights[{{ g }}][i] - highest);
        sum += weight;
        value += weight * v_cache[(begin + i) * KV * 4u + kv_head * {{ head_dim }}u + d];
      }
      partials[at * {{ head_dim }}u + d] = value;
      if (d == 0u) { normals[at] = vec2f(highest, sum); }
    }
  }
{% endfor %}
}
