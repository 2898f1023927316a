// A tensor's blocks as they are in the GGUF file -> the layout of formats.wgsl. One thread per block of 32 weights.
// Several tensors can share one matrix: this one fills rows FIRST_ROW .. FIRST_ROW + ROWS of ALL_ROWS.
{% import "formats.wgsl" as formats %}
{% set block_bytes = {"F32": 128, "F16": 64, "Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[format] %}
{% set vectors = formats.vectors(format) | int %}
{% set quantised = formats.quantised(format) %}
{% set data_at = block_bytes - 16 * vectors %}
@group(0) @binding(0) var<storage, read> raw: array<u32>;
@group(0) @binding(1) var<storage, read_write> words: array<vec4u>;
{% if quantised %}
@group(0) @binding(2) var<storage, read_write> scales: array<vec2f>;
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
{% if format in ("Q4_0", "Q4_1") %}

// The low nibbles of eight bytes, as one word in order.
fn nibbles(a: u32, b: u32) -> u32 {
  var low = vec2u(a, b) & vec2u(0x0f0f0f0fu);
  low = (low | (low >> vec2u(4u))) & vec2u(0x00ff00ffu);
  low = (low | (low >> vec2u(8u))) & vec2u(0xffffu);
  return low.x | (low.y << 16u);
}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3u) {
  let row = id.x;
  let block = id.y;
  if (row >= ROWS) { return; }
  let source = (row * BLOCKS + block) * {{ block_bytes }}u;
  let place = FIRST_ROW + row;
{% if format == "Q4_1" %}
  scales[block * ALL_ROWS + place] = unpack2x16float(load(source));
{% elif format == "Q4_0" %}
  // value = d * (q - 8) = d * q + m
  let d = unpack2x16float(load(source)).x;
  scales[block * ALL_ROWS + place] = vec2f(d, -8.0 * d);
{% elif format == "Q8_0" %}
  // value = d * q, with q + 128 stored
  let d = unpack2x16float(load(source)).x;
  scales[block * ALL_ROWS + place] = vec2f(d, -128.0 * d);
{% endif %}
{% if format in ("Q4_0", "Q4_1") %}
  // in the file, low nibbles are elements 0..15 and high nibbles 16..31
  let a = load(source + {{ data_at }}u);
  let b = load(source + {{ data_at + 4 }}u);
  let c = load(source + {{ data_at + 8 }}u);
  let e = load(source + {{ data_at + 12 }}u);
  words[block * ALL_ROWS + place] = vec4u(nibbles(a, b), nibbles(c, e), nibbles(a >> 4u, b >> 4u), nibbles(c >> 4u, e >> 4u));
{% else %}
  for (var i = 0u; i < {{ vectors }}u; i++) {
    let at = source + {{ data_at }}u + i * 16u;
    words[(block * {{ vectors }}u + i) * ALL_ROWS + place] = vec4u(load(at), load(at + 4u), load(at + 8u), load(at + 12u)){{ " ^ vec4u(0x80808080u)" if format == "Q8_0" }};
  }
{% endif %}
}
