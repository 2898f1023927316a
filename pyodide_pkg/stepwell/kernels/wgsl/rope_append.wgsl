// For each row of qkv: rotate q in place; rotate k and append it, and v as it is, to the KV cache at the row's position.
// Pairs are neighbours (2i, 2i+1), as GGUF stores Llama's q and k. One thread per pair: the q pairs, then k, then v.
// A step that reaches `long_from` positions takes the second table of rotations, if there are two.
//
// sin and cos of large angles are not accurate enough in WGSL, so the rotation of a position is the product of the
// rotations of its binary digits, which the host computed in double precision (16 products: error about 2e-6).
{% import "kv.wgsl" as kv %}
{% include "step.wgsl" %}
@group(0) @binding(1) var<storage, read> turns: array<vec2f>;          // [table][bit][pair]: cos, sin of 2^bit * frequency
@group(0) @binding(2) var<storage, read_write> qkv: array<vec2f>;      // [row][(heads + 2 kv_heads) * head_dim]
{{ kv.declare(slabs, half, 3, "read_write", 2, 2, 1) }}
{{ kv.rows(slabs) }}

const HALF = {{ head_dim // 2 }}u;        // pairs per head
const ROTATED = {{ rope_dim // 2 }}u;     // of which the first are rotated
const Q = {{ heads * head_dim // 2 }}u;   // pairs of q in a row
const KV = {{ kv_heads * head_dim // 2 }}u;

fn times(a: vec2f, b: vec2f) -> vec2f {  // complex product
  return vec2f(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
}

fn rotate(pair: vec2f, index: u32, position: u32) -> vec2f {
  if (index >= ROTATED) { return pair; }
{% if long_from %}
  let table = select(0u, {{ bits }}u, step.length >= {{ long_from }}u);
{% else %}
  const table = 0u;
{% endif %}
  var turn = vec2f({{ rope_scale }}, 0.0);
  var rest = position;
  for (var bit = table; rest != 0u; bit++) {
    if ((rest & 1u) != 0u) { turn = times(turn, turns[bit * ROTATED + index]); }
    rest >>= 1u;
  }
  return times(pair, turn);
}

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3u) {
  let i = id.x;
  if (i >= Q + 2u * KV) { return; }
  let at = id.y * (Q + 2u * KV) + i;
  let position = step.position + id.y;
  let pair = qkv[at];
  if (i < Q) {
    qkv[at] = rotate(pair, i % HALF, position);
  } else if (i < Q + KV) {
    {{ kv.k(slabs) }}[rows_of(position).x * KV + i - Q] = {{ kv.pair(half, "rotate(pair, (i - Q) % HALF, position)") }};
  } else {
    {{ kv.v(slabs) }}[rows_of(position).y * KV + i - Q - KV] = {{ kv.pair(half, "pair") }};
  }
}
