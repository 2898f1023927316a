// A tensor's blocks as they are in the GGUF file -> the layout of formats.wgsl. One thread per block of 32 weights.
// Several tensors can share one matrix: this one fills rows FIRST_ROW .. FIRST_ROW + ROWS of ALL_ROWS, and if they have
// different types, the matrix has a layout that holds them all: nothing is rounded.
//
// PAIRING: the first rows of the tensor are heads that files rotate by halves, in pairs (i, i + rope_dim / 2); here they
// become neighbours, which is what the rotating kernels know. q and k change alike, so their products stay.
//
// Sources: block structs of ggml-common.h, dequantize_row_* of ggml-quants.c. K-quants are blocks of 256 weights, whose
// eight blocks of 32 have scales and minimums of 6 bits (Q4_K, Q5_K), or two scales of 8 bits each (Q6_K).
{% import "formats.wgsl" as formats %}
{% set layout = layouts[format] %}
{% set block_size, block_bytes = {
  "F32": (32, 128), "F16": (32, 64), "BF16": (32, 64),
  "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
  "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}[source] %}
{# a quantised weight is scale * (code - offset), or scale * code + minimum where there is no offset #}
{% set offset = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32, "Q8_0": 128}.get(source, 0) %}
@group(0) @binding(0) var<storage, read> raw: array<u32>;
{{ formats.declare(format, 1, "read_write") }}

const ROWS = {{ rows }}u;
const BLOCKS = {{ columns // block_size }}u;  // of the file, per row
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
{% if source in ("Q5_0", "Q5_1") %}

// Four bits to bit 4 of four bytes.
fn spread(bits: u32) -> u32 {
  return ((bits & 1u) << 4u) | ((bits & 2u) << 11u) | ((bits & 4u) << 18u) | ((bits & 8u) << 25u);
}
{% elif source in ("Q4_K", "Q5_K") %}

fn byte(address: u32) -> u32 {
  return (raw[address / 4u] >> (8u * (address % 4u))) & 255u;
}

// The 6-bit scale and minimum of block i, out of twelve bytes: eight in the low six bits of the first eight; the others
// in the nibbles of the last four and the top two bits of the first eight.
fn scale_and_minimum(at: u32, i: u32) -> vec2f {
  if (i < 4u) { return vec2f(vec2u(byte(at + i), byte(at + i + 4u)) & vec2u(63u)); }
  let low = byte(at + i + 4u);
  let high = vec2u(byte(at + i - 4u), byte(at + i)) >> vec2u(6u);
  return vec2f(vec2u(low & 15u, low >> 4u) | (high << vec2u(4u)));
}
{% endif %}
{% if layout.bits < 8 %}

// The low nibbles of eight codes.
fn nibbles(a: u32, b: u32) -> u32 {
  return (a & 0x0f0f0f0fu) | ((b & 0x0f0f0f0fu) << 4u);
}
{% endif %}
{% if layout.high_words %}

// Their bits above.
fn high(a: u32, b: u32) -> u32 {
  return nibbles(a >> 4u, b >> 4u) & {{ (2 ** layout.high_words - 1) * 0x11111111 }}u;
}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3u) {
  let row = id.x;
  let block = id.y;
  if (row >= ROWS) { return; }
{% if pairing %}
{% set rows, head_dim, rope_dim = pairing %}
  let within = row % {{ head_dim }}u;
  let neighbour = select(2u * within, 2u * within - {{ rope_dim - 1 }}u, within >= {{ rope_dim // 2 }}u);
  let moves = row < {{ rows }}u && within < {{ rope_dim }}u;
  let place = FIRST_ROW + select(row, row - within + neighbour, moves);
{% else %}
  let place = FIRST_ROW + row;
{% endif %}
{% if block_size == 32 %}
  let at = (row * BLOCKS + block) * {{ block_bytes }}u;
{% else %}
  let at = (row * BLOCKS + block / 8u) * {{ block_bytes }}u;
  let part = block % 8u;
{% endif %}
{% if not layout.quantised %}
{% set halves = layout.bits == 32 and source != "F32" %}
  for (var i = 0u; i < {{ layout.vectors }}u; i++) {
{% if halves %}
    let a = load(at + i * 8u);
    let b = load(at + i * 8u + 4u);
{% if source == "BF16" %}
    let value = vec4u(a << 16u, a & 0xffff0000u, b << 16u, b & 0xffff0000u);
{% else %}
    let value = bitcast<vec4u>(vec4f(unpack2x16float(a), unpack2x16float(b)));
{% endif %}
{% else %}
    let start = at + i * 16u;
    let value = vec4u(load(start), load(start + 4u), load(start + 8u), load(start + 12u));
{% endif %}
    words[(block * {{ layout.vectors }}u + i) * ALL_ROWS + place] = value;
  }
{% else %}
  var codes: array<u32, 8>;  // a byte each, in order, counted from zero
{% if source in ("Q4_0", "Q4_1", "Q5_0", "Q5_1") %}
  // low nibbles are elements 0..15, high ones 16..31
{% if source in ("Q5_0", "Q5_1") %}
  let bits = load(at + {{ block_bytes - 20 }}u);
{% endif %}
  for (var i = 0u; i < 4u; i++) {
    let packed = load(at + {{ block_bytes - 16 }}u + i * 4u);
    codes[i] = packed & 0x0f0f0f0fu;
    codes[i + 4u] = (packed >> 4u) & 0x0f0f0f0fu;
{% if source in ("Q5_0", "Q5_1") %}
    codes[i] |= spread(bits >> (4u * i));
    codes[i + 4u] |= spread(bits >> (4u * i + 16u));
{% endif %}
  }
{% elif source == "Q8_0" %}
  for (var i = 0u; i < 8u; i++) { codes[i] = load(at + 2u + i * 4u) ^ 0x80808080u; }
{% elif source in ("Q4_K", "Q5_K") %}
  // parts 2i and 2i + 1 are the low and the high nibbles of the same 32 bytes; bit i of the high bits belongs to part i
  for (var i = 0u; i < 8u; i++) {
    codes[i] = (load(at + {{ block_bytes - 128 }}u + (part / 2u) * 32u + i * 4u) >> (4u * (part % 2u))) & 0x0f0f0f0fu;
{% if source == "Q5_K" %}
    codes[i] |= ((load(at + 16u + i * 4u) >> part) & 0x01010101u) << 4u;
{% endif %}
  }
{% else %}
  // of either half of 128: parts 0 and 1 are the low nibbles of 64 bytes, parts 2 and 3 the high ones; bits 2i and
  // 2i + 1 of 32 more bytes belong to part i
  let half = part / 4u;
  let quarter = part % 4u;
  for (var i = 0u; i < 8u; i++) {
    let low = load(at + half * 64u + (quarter % 2u) * 32u + i * 4u) >> (4u * (quarter / 2u));
    let top = load(at + 128u + half * 32u + i * 4u) >> (2u * quarter);
    codes[i] = (low & 0x0f0f0f0fu) | ((top & 0x03030303u) << 4u);
  }
{% endif %}

{% if source in ("Q4_1", "Q5_1") %}
  let parts = unpack2x16float(load(at));
{% set scale, minimum = ("parts.x", "parts.x"), "parts.y" %}
{% elif source in ("Q4_K", "Q5_K") %}
  let parts = unpack2x16float(load(at)) * scale_and_minimum(at + 4u, part);
{% set scale, minimum = ("parts.x", "parts.x"), "-parts.y" %}
{% elif source == "Q6_K" %}
  let packed = bitcast<i32>(load(at + 192u + part * 2u));
  let d = unpack2x16float(load(at + 208u)).x * vec2f(vec2i((packed << 24u) >> 24u, (packed << 16u) >> 24u));
{% set scale = ("d.x", "d.y") %}
{% else %}
  let d = unpack2x16float(load(at)).x;
{% set scale = ("d", "d") %}
{% endif %}
{% if layout.offset > offset %}
  for (var i = 0u; i < 8u; i++) { codes[i] += {{ (layout.offset - offset) * 0x01010101 }}u; }
{% endif %}

{% if layout.bits == 8 %}
  words[block * 2u * ALL_ROWS + place] = vec4u(codes[0], codes[1], codes[2], codes[3]);
  words[(block * 2u + 1u) * ALL_ROWS + place] = vec4u(codes[4], codes[5], codes[6], codes[7]);
{% else %}
  words[block * ALL_ROWS + place] = vec4u(
    nibbles(codes[0], codes[1]), nibbles(codes[2], codes[3]), nibbles(codes[4], codes[5]), nibbles(codes[6], codes[7])
  );
{% endif %}
{% set out = [] %}
{% for g in range(layout.groups) %}
{% set _ = out.append("bitcast<u32>(%s)" % scale[g]) %}
{% if layout.minimum %}
{% set _ = out.append("bitcast<u32>(%s)" % ("-%d.0 * %s" % (offset, scale[g]) if offset else minimum)) %}
{% endif %}
{% endfor %}
{% if layout.high_words == 1 %}
{% set _ = out.append("high(codes[0], codes[1]) | (high(codes[2], codes[3]) << 1u) | (high(codes[4], codes[5]) << 2u) | (high(codes[6], codes[7]) << 3u)") %}
{% elif layout.high_words == 2 %}
{% set _ = out.append("high(codes[0], codes[1]) | (high(codes[2], codes[3]) << 2u)") %}
{% set _ = out.append("high(codes[4], codes[5]) | (high(codes[6], codes[7]) << 2u)") %}
{% endif %}
{% set width = layout.scale_width %}
{% for i in range(layout.scale_vectors) %}
  scales[(block * {{ layout.scale_vectors }}u + {{ i }}u) * ALL_ROWS + place] = {{ formats.scale_type(format) }}({{ out[i * width : (i + 1) * width] | join(", ") }});
{% endfor %}
{% endif %}
}
