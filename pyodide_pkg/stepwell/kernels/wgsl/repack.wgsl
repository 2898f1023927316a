// A tensor's blocks as they are in the GGUF file -> the layout of formats.wgsl. One thread per block of 32 weights.
// Several tensors can share one matrix: this one fills rows `first_row` .. `first_row + rows` of `all_rows`.
{% import "formats.wgsl" as formats %}
{% set block_bytes = {"F32": 128, "F16": 64, "Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[format] %}
{% set words = formats.block_words(format) | int %}
@group(0) @binding(0) var<storage, read> raw: array<u32>;
@group(0) @binding(1) var<storage, read_write> words: array<vec4u>;
{% if formats.has_scales(format) %}
@group(0) @binding(2) var<storage, read_write> scales: array<u32>;
{% endif %}

const ROWS = {{ rows }}u;
const BLOCKS = {{ columns // 32 }}u;  // per row
const FIRST_ROW = {{ first_row }}u;
const ALL_ROWS = {{ all_rows }}u;

// The 32 bits at any even byte address.
fn load(address: u32) -> u32 {
  let word = raw[address / 4u];
{% if block_bytes % 4 == 0 %}
  return word;
{% else %}
  if (address % 4u == 0u) { return word; }
  return (word >> 16u) | (raw[address / 4u + 1u] << 16u);
{% endif %}
}

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3u) {
  let row = id.x;
  let block = id.y;
  if (row >= ROWS) { return; }
  let source = (row * BLOCKS + block) * {{ block_bytes }}u;
{% if format == "Q4_1" %}
  scales[block * ALL_ROWS + FIRST_ROW + row] = load(source);
{% elif formats.has_scales(format) %}
  scales[block * ALL_ROWS + FIRST_ROW + row] = load(source) & 0xffffu;
{% endif %}
  let data = source + {{ block_bytes - 16 * words }}u;
  for (var i = 0u; i < {{ words }}u; i++) {
    let at = data + i * 16u;
    words[(block * {{ words }}u + i) * ALL_ROWS + FIRST_ROW + row] = vec4u(load(at), load(at + 4u), load(at + 8u), load(at + 12u));
  }
}
