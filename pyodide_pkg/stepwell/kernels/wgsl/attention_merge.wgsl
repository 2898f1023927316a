// out[row][head] = the chunks of `attention_quad` or `attention_split` put together. One thread per vec4 of the output.
{% import "kv.wgsl" as kv %}
{% include "step.wgsl" %}
@group(0) @binding(1) var<storage, read> partials: array<vec4f>;        // [chunk][row][heads][head_dim]
@group(0) @binding(2) var<storage, read> normals: array<vec2f>;         // [chunk][row][heads]: maximum, sum
@group(0) @binding(3) var<storage, read_write> out: array<vec4f>;       // [row][heads * head_dim]
{% if slabs %}
@group(0) @binding(4) var<uniform> pages: array<vec4u, {{ slabs + 1 }}>;  // see kv.wgsl
{% endif %}

const D4 = {{ head_dim // 4 }}u;
const HEADS = {{ heads }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= HEADS * D4) { return; }
  let head = id.x / D4;
  let row = id.y;
{% if slabs %}
  let visible = {{ kv.chunk_count(slabs, column, chunk) }};
{% else %}
  let visible = (step.position + row + {{ chunk }}u) / {{ chunk }}u;  // to this row: the later ones are empty
{% endif %}
  var highest = -1e30;
  var sum = 0.0;
  var value = vec4f(0.0);
  for (var chunk = 0u; chunk < visible; chunk++) {
    let at = (chunk * step.rows + row) * HEADS + head;
    let normal = normals[at];
    let top = max(highest, normal.x);
    let old = exp(highest - top);
    let new_ = exp(normal.x - top);
    sum = sum * old + normal.y * new_;
    value = value * old + partials[at * D4 + id.x % D4] * new_;
    highest = top;
  }
  out[row * HEADS * D4 + id.x] = value / sum;
}
