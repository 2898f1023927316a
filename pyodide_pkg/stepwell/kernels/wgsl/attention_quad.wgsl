// Partial attention of one chunk of positions, for CPU adapters with subgroups of four: one lane set per (chunk, kv head,
// row), and the GROUP query heads of a kv head share every load of K and V.
//
// Per row, chunk and head: partial = sum of exp(score - max) * v, and (max, sum of exp(score - max)). Online softmax over
// four positions at a time. `attention_merge` puts the chunks together.
enable subgroups;
{% import "kv.wgsl" as kv %}
{% include "step.wgsl" %}
{% set d4 = head_dim // 4 %}
{% set parts = head_dim // 16 %}
{% set group_size = heads // kv_heads %}
@group(0) @binding(1) var<storage, read> qkv: array<vec4f>;                // [row][(heads + 2 kv_heads) * head_dim]
@group(0) @binding(2) var<storage, read_write> partials: array<vec4f>;     // [chunk][row][heads][head_dim]
@group(0) @binding(3) var<storage, read_write> normals: array<vec2f>;      // [chunk][row][heads]: maximum, sum
{{ kv.declare(slabs, half, 4, "read", 4, 4, slabs) }}
{{ kv.chunks(slabs, column, chunk) }}

const ROW = {{ (heads + 2 * kv_heads) * d4 }}u;
const KV = {{ kv_heads * d4 }}u;

@compute @workgroup_size(4)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
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
{% for g in range(group_size) %}
{% for i in range(parts) %}
  let q{{ g }}_{{ i }} = qkv[row * ROW + (kv_head * {{ group_size }}u + {{ g }}u) * {{ d4 }}u + {{ 4 * i }}u + lane] * {{ head_dim ** -0.5 }};
  var value{{ g }}_{{ i }} = vec4f(0.0);
{% endfor %}
  var highest{{ g }} = -1e30;
  var sum{{ g }} = 0.0;
{% endfor %}
{% call(k_cache, v_cache) kv.choose(slabs, "chunk.slab") %}
  for (var p = begin; p < end; p += 4u) {
    // scores: each lane takes one position
    let k_at = (min(p + lane, end - 1u) + chunk.k) * KV + kv_head * {{ d4 }}u;
{% for g in range(group_size) %}
    var score{{ g }} = vec4f(0.0);
{% endfor %}
{% for j in range(d4) %}
    {
      let k = {{ kv.four(half, "%s[k_at + %du]" % (k_cache, j)) }};
{% for g in range(group_size) %}
      score{{ g }} += k * subgroupBroadcast(q{{ g }}_{{ j // 4 }}, {{ j % 4 }}u);
{% endfor %}
    }
{% endfor %}
{% for g in range(group_size) %}
    let s{{ g }} = select(-1e30, dot(score{{ g }}, vec4f(1.0)), p + lane < end);
    let top{{ g }} = max(highest{{ g }}, subgroupMax(s{{ g }}));
    let old{{ g }} = exp(highest{{ g }} - top{{ g }});
    let weight{{ g }} = exp(s{{ g }} - top{{ g }});
    sum{{ g }} = sum{{ g }} * old{{ g }} + weight{{ g }};
    highest{{ g }} = top{{ g }};
{% for i in range(parts) %}
    value{{ g }}_{{ i }} *= old{{ g }};
{% endfor %}
{% endfor %}
    // values: each lane takes every fourth vector of the head
{% for m in range(4) %}
    {
      let v_at = (min(p + {{ m }}u, end - 1u) + chunk.v) * KV + kv_head * {{ d4 }}u + lane;
{% for g in range(group_size) %}
      let w{{ g }} = subgroupBroadcast(weight{{ g }}, {{ m }}u);
{% endfor %}
{% for i in range(parts) %}
      let v{{ i }} = {{ kv.four(half, "%s[v_at + %du]" % (v_cache, 4 * i)) }};
{% for g in range(group_size) %}
      value{{ g }}_{{ i }} += w{{ g }} * v{{ i }};
{% endfor %}
{% endfor %}
    }
{% endfor %}
  }
{% endcall %}
{% for g in range(group_size) %}
  {
    let at = (number * groups.z + row) * {{ heads }}u + kv_head * {{ group_size }}u + {{ g }}u;
    let all = subgroupAdd(sum{{ g }});
    if (lane == 0u) { normals[at] = vec2f(highest{{ g }}, all); }
{% for i in range(parts) %}
    partials[at * {{ d4 }}u + {{ 4 * i }}u + lane] = value{{ g }}_{{ i }};
{% endfor %}
  }
{% endfor %}
}
