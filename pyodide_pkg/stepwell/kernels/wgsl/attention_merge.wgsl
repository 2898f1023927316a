// out[row][head] = the chunks of `attention_quad` or `attention_split` put together. One thread per vec4 of the output.
{% include "step.wgsl" %}
@group(0) @binding(1) var<storage, read> partials: array<vec4f>;        // [row][chunk][heads][head_dim]
@group(0) @binding(2) var<storage, read> normals: array<vec2f>;         // [row][chunk][heads]: maximum, sum
@group(0) @binding(3) var<storage, read_write> out: array<vec4f>;       // [row][heads * head_dim]

const D4 = {{ head_dim // 4 }}u;
const HEADS = {{ heads }}u;
const CHUNK = {{ chunk }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3u) {
  if (id.x >= HEADS * D4) { return; }
  let head = id.x / D4;
  let row = id.y;
  let chunks = (step.length + CHUNK - 1u) / CHUNK;             // of the step: how the partials are laid out
  let visible = (step.position + row + CHUNK) / CHUNK;         // of this row: the later ones are empty
  var highest = -1e30;
  var sum = 0.0;
  var value = vec4f(0.0);
  for (var chunk = 0u; chunk < visible; chunk++) {
    let at = (row * chunks + chunk) * HEADS + head;
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
