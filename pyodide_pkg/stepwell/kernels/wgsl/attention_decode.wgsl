// Attention of one row over one chunk of positions, for GPUs: a workgroup per (chunk, kv head), a thread per position for
// the scores, then per (part of the positions, vec4 of the head) for the values. The GROUP query heads of a kv head share
// every load of K and V, and every barrier. Its output is what `attention_split` writes for one row.
{% import "reduce.wgsl" as reduce %}
{{ reduce.enable(subgroup) }}
{% include "step.wgsl" %}
{% set d4 = head_dim // 4 %}
{% set group_size = heads // kv_heads %}
{% set parts = chunk // d4 %}
{% set sets = chunk // subgroup if subgroup else chunk %}
@group(0) @binding(1) var<storage, read> q: array<vec4f>;                // [heads * head_dim]
@group(0) @binding(2) var<storage, read> k_cache: array<vec4f>;          // [position][kv_heads * head_dim]
@group(0) @binding(3) var<storage, read> v_cache: array<vec4f>;
@group(0) @binding(4) var<storage, read_write> partials: array<vec4f>;   // [chunk][heads][head_dim]
@group(0) @binding(5) var<storage, read_write> normals: array<vec2f>;    // [chunk][heads]: maximum, sum

const KV = {{ kv_heads * d4 }}u;
const CHUNK = {{ chunk }}u;
const D4 = {{ d4 }}u;
var<workgroup> tops: array<array<f32, {{ [sets, parts] | max }}>, {{ group_size }}>;  // of each subgroup, or of each thread
var<workgroup> weights: array<array<f32, CHUNK>, {{ group_size }}>;
var<workgroup> values: array<vec4f, CHUNK>;

@compute @workgroup_size(CHUNK)
fn main(@builtin(workgroup_id) group: vec3u, {{ reduce.parameters(subgroup) }}) {
  let thread = {{ reduce.thread(subgroup) }};
  let kv_head = group.y;
  let begin = group.x * CHUNK;
  let count = min(CHUNK, step.length - begin);
  let k_at = min(begin + thread, step.length - 1u) * KV + kv_head * D4;
  let q_at = kv_head * {{ group_size * d4 }}u;
{% for g in range(group_size) %}
  var score{{ g }} = vec4f(0.0);
{% endfor %}
{% for j in range(d4) %}
  {
    let k = k_cache[k_at + {{ j }}u];
{% for g in range(group_size) %}
    score{{ g }} += k * q[q_at + {{ g * d4 + j }}u];
{% endfor %}
  }
{% endfor %}
{% for g in range(group_size) %}
  let s{{ g }} = select(-1e30, dot(score{{ g }}, vec4f({{ head_dim ** -0.5 }})), thread < count);
{% if subgroup %}
  let own{{ g }} = subgroupMax(s{{ g }});
  if (lane == 0u) { tops[{{ g }}][subgroup] = own{{ g }}; }
{% else %}
  tops[{{ g }}][thread] = s{{ g }};
{% endif %}
{% endfor %}
  workgroupBarrier();
{% if not subgroup %}
  for (var half = CHUNK; half > 1u; ) {
    let rest = (half + 1u) / 2u;
    if (thread + rest < half) {
{% for g in range(group_size) %}
      tops[{{ g }}][thread] = max(tops[{{ g }}][thread], tops[{{ g }}][thread + rest]);
{% endfor %}
    }
    half = rest;
    workgroupBarrier();
  }
{% endif %}
{% for g in range(group_size) %}
  var top{{ g }} = tops[{{ g }}][0];
{% if subgroup %}
{% for i in range(1, sets) %}
  top{{ g }} = max(top{{ g }}, tops[{{ g }}][{{ i }}]);
{% endfor %}
{% endif %}
  weights[{{ g }}][thread] = select(0.0, exp(s{{ g }} - top{{ g }}), thread < count);
{% endfor %}
  workgroupBarrier();
  let column = thread % D4;
  let first = select(count, thread / D4, thread < {{ parts * d4 }}u);
{% for g in range(group_size) %}
  var value{{ g }} = vec4f(0.0);
  var sum{{ g }} = 0.0;
{% endfor %}
  for (var p = first; p < count; p += {{ parts }}u) {
    let v = v_cache[(begin + p) * KV + kv_head * D4 + column];
{% for g in range(group_size) %}
    let weight{{ g }} = weights[{{ g }}][p];
    value{{ g }} += weight{{ g }} * v;
    sum{{ g }} += weight{{ g }};
{% endfor %}
  }
{% for g in range(group_size) %}
  // the parts of a column meet; the sums of the weights are those of column 0
  values[thread] = value{{ g }};
  if (column == 0u && thread < {{ parts * d4 }}u) { tops[{{ g }}][thread / D4] = sum{{ g }}; }
  workgroupBarrier();
  if (thread < D4) {
    let at = group.x * {{ heads }}u + kv_head * {{ group_size }}u + {{ g }}u;
    var all = vec4f(0.0);
    for (var part = 0u; part < {{ parts }}u; part++) { all += values[part * D4 + thread]; }
    partials[at * D4 + thread] = all;
    if (thread == 0u) {
      var sum = 0.0;
      for (var part = 0u; part < {{ parts }}u; part++) { sum += tops[{{ g }}][part]; }
      normals[at] = vec2f(top{{ g }}, sum);
    }
  }
{% if not loop.last %}
  workgroupBarrier();
{% endif %}
{% endfor %}
}
