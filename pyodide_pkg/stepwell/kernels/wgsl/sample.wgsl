// token[0] = an id drawn from softmax(logits / temperature), cut to the top k and then to the nucleus p: what it is to be
// stands in kernels/sampling.py. Ids are told apart by their distance from the largest logit, a whole number of STEPS of a
// temperature: sums of ids, and of weights in fixed point, do not depend on the order of atomic additions, so that the
// same logits and the same draw give the same id.
//
// `stage`, each a launch of its own, by workgroups that share the ids out in PARTS (`pick`: by one):
//   tops       the largest logit of each part; clears the histograms
//   distances  of every id; how many ids each bin of distances has, and what they weigh
//   top_k      the bin of the k-th id; how many of its ids are at each distance
//   top_p      the bin in which the nucleus ends; the same of its ids
//   sums       the cut: all nearer ids are in, and some of those at it, the smallest ids first; what is in of each part
//   pick       walks the ids in their order until what they weigh exceeds draw * all
// A stage repeats, in every workgroup, the little that is to be done between the one before it and it.
{% include "step.wgsl" %}
const SIZE = {{ size }}u;
const PARTS = {{ parts }}u;
const PER = {{ (size + parts - 1) // parts }}u;  // ids of a part
const THREADS = {{ threads }}u;
const BINS = {{ sampling.bins }}u;         // each of as many distances
const STEPS = {{ sampling.steps }}.0;      // per temperature
const OUT = BINS * BINS;     // the distance of an id that is never drawn
const UNITS = {{ sampling.units }}.0;     // of the fixed point
struct Work {
  tops: array<u32, PARTS>,           // keys: larger for a larger logit, 0 for none
  sums: array<f32, PARTS>,           // weights of the ids nearer than the cut
  ties: array<u32, PARTS>,           // ids at the cut
  ids: array<atomic<u32>, BINS>,     // of each bin
  lacks: array<atomic<u32>, BINS>,   // what they weigh less than as many at the near end of the bin
  ids_k: array<atomic<u32>, BINS>,   // at each distance of the bin of the k-th
  ids_p: array<atomic<u32>, BINS>,   // and of the bin where the nucleus ends
  bin_k: u32,
  rest_k: f32,                       // how many ids of the bin are in
  bin_p: u32,
  rest_p: f32,                       // what weight of the bin is in
  cut: u32,
  ties_in: f32,                      // how many ids at the cut are in
}
struct Settings { inverse_temperature: f32, top_p: f32, top_k: u32 }

@group(0) @binding(1) var<storage, read_write> work: Work;
{% if stage == "tops" %}
@group(0) @binding(2) var<storage, read> logits: array<f32>;
{% elif stage == "distances" %}
@group(0) @binding(2) var<storage, read_write> distances: array<u32>;
@group(0) @binding(3) var<storage, read> logits: array<f32>;
@group(0) @binding(4) var<storage, read> settings: Settings;
{% else %}
@group(0) @binding(2) var<storage, read> distances: array<u32>;
{% if stage == "pick" %}
@group(0) @binding(3) var<storage, read_write> token: array<u32>;
{% elif stage in ("top_k", "top_p") %}
@group(0) @binding(3) var<storage, read> settings: Settings;
{% endif %}
{% endif %}
{% if stage in ("tops", "distances") %}

// Whether the id may be drawn: its logit is a finite number, and it is not banned.
fn may_be(i: u32, bits: u32) -> bool {
  return ((bits & 0x7f800000u) != 0x7f800000u){% for id in ban %} & (i != {{ id }}u){% endfor %};
}

fn key_of(bits: u32) -> u32 { return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u); }

fn logit_of(key: u32) -> f32 { return bitcast<f32>(select(~key, key & 0x7fffffffu, key >= 0x80000000u)); }

var<workgroup> top: atomic<u32>;
{% else %}

fn weight(distance: u32) -> f32 { return exp(-f32(distance) / STEPS); }

var<workgroup> ends: array<f32, THREADS>;  // of each thread: its value and those of all before it
var<workgroup> first: atomic<u32>;
var<workgroup> last: atomic<u32>;

fn accumulate(value: f32, thread: u32) {
  workgroupBarrier();
  ends[thread] = value;
  workgroupBarrier();
  for (var reach = 1u; reach < THREADS; reach *= 2u) {
    let below = select(0.0, ends[max(thread, reach) - reach], thread >= reach);
    workgroupBarrier();
    ends[thread] += below;
    workgroupBarrier();
  }
}

fn end_before(thread: u32) -> f32 { return select(0.0, ends[max(thread, 1u) - 1u], thread > 0u); }

// The first thread with a value and an end {{ "beyond" if stage == "pick" else "not before" }} `goal`; the last one with a value where rounding has put the goal out
// of reach; THREADS if none has one. After `accumulate`, and collective like it.
fn thread_at(goal: f32, value: f32, thread: u32) -> u32 {
  if (thread == 0u) {
    atomicStore(&first, THREADS);
    atomicStore(&last, 0u);
  }
  workgroupBarrier();
  if (value > 0.0) {
    if (ends[thread] {{ ">" if stage == "pick" else ">=" }} goal) { atomicMin(&first, thread); }
    atomicMax(&last, thread + 1u);
  }
  workgroupBarrier();
  let found = atomicLoad(&first);
  let end = atomicLoad(&last);
  return select(select(found, end - 1u, found == THREADS), THREADS, end == 0u);
}
{% endif %}
{% if stage in ("top_k", "top_p", "sums") %}

struct Found { index: u32, rest: f32 }
const OWN = BINS / THREADS;
var<private> measures: array<f32, OWN>;  // of the bins from thread * OWN on
var<workgroup> found: Found;

// Accumulates the measures of all threads; returns what those of this one make.
fn add_up(thread: u32) -> f32 {
  var own = 0.0;
  for (var i = 0u; i < OWN; i++) { own += measures[i]; }
  accumulate(own, thread);
  return own;
}

// The first index up to which the measures make `goal`, and how much of its own that takes; BINS where all are less.
fn find(goal: f32, own: f32, thread: u32) -> Found {
  let chosen = thread_at(goal, own, thread);
  if (thread == select(chosen, 0u, chosen == THREADS)) {
    found = Found(BINS, 0.0);
    var rest = select(0.0, max(goal - end_before(thread), 1e-30), ends[THREADS - 1u] >= goal);
    for (var i = 0u; i < OWN; i++) {
      if (measures[i] > 0.0 && rest > 0.0) { found = Found(thread * OWN + i, rest); }
      rest -= measures[i];
    }
  }
  workgroupBarrier();
  return found;
}

// Where the top k end: the distance, and how many of the ids at it are in.
fn cut_of_k(thread: u32) -> Found {
  for (var i = 0u; i < OWN; i++) { measures[i] = f32(atomicLoad(&work.ids_k[thread * OWN + i])); }
  let last_in = find(work.rest_k, add_up(thread), thread);
  return Found(select(work.bin_k * BINS + last_in.index, OUT, last_in.index == BINS), last_in.rest);
}
{% elif stage == "pick" %}

const OWN = (PER + THREADS - 1u) / THREADS;
var<workgroup> ties_before: f32;
{% endif %}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) thread: u32) {
  let begin = group.x * PER;
  let end = min(begin + PER, SIZE);
{% if stage == "tops" %}
  for (var i = group.x * THREADS + thread; i < BINS; i += PARTS * THREADS) {
    atomicStore(&work.ids[i], 0u);
    atomicStore(&work.lacks[i], 0u);
    atomicStore(&work.ids_k[i], 0u);
    atomicStore(&work.ids_p[i], 0u);
  }
  var best = 0u;
  for (var i = begin + thread; i < end; i += THREADS) {
    let bits = bitcast<u32>(logits[i]);
    best = max(best, select(0u, key_of(bits), may_be(i, bits)));
  }
  atomicMax(&top, best);
  workgroupBarrier();
  if (thread == 0u) { work.tops[group.x] = atomicLoad(&top); }
{% elif stage == "distances" %}
  for (var i = thread; i < PARTS; i += THREADS) { atomicMax(&top, work.tops[i]); }
  workgroupBarrier();
  let largest = logit_of(atomicLoad(&top));
  for (var i = begin + thread; i < end; i += THREADS) {
    let logit = logits[i];
    let steps = min((largest - logit) * settings.inverse_temperature * STEPS, f32(OUT));
    let distance = select(OUT, u32(steps), may_be(i, bitcast<u32>(logit)));
    distances[i] = distance;
{% if counted %}
    if (distance < OUT) {
      atomicAdd(&work.ids[distance / BINS], 1u);
      atomicAdd(&work.lacks[distance / BINS], u32((1.0 - exp(-f32(distance % BINS) / STEPS)) * UNITS + 0.5));
    }
{% endif %}
  }
{% elif stage in ("top_k", "top_p") %}
{% if stage == "top_k" %}
  for (var i = 0u; i < OWN; i++) { measures[i] = f32(atomicLoad(&work.ids[thread * OWN + i])); }
  let last_in = find(f32(settings.top_k), add_up(thread), thread);
{% else %}
{% if top_k %}
  // of the bin of the k-th what is in
  let cut = cut_of_k(thread);
  for (var i = 0u; i < OWN; i++) {
    let distance = work.bin_k * BINS + thread * OWN + i;
    let ids = select(select(0.0, cut.rest, distance == cut.index), measures[i], distance < cut.index);
    measures[i] = ids * weight(distance);
  }
  add_up(thread);
  let of_bin_k = ends[THREADS - 1u];
{% endif %}
  for (var i = 0u; i < OWN; i++) {
    let bin = thread * OWN + i;
    let lack = f32(atomicLoad(&work.lacks[bin])) / UNITS;
    let all = (f32(atomicLoad(&work.ids[bin])) - lack) * weight(bin * BINS);
    measures[i] = {{ "select(select(0.0, of_bin_k, bin == work.bin_k), all, bin < work.bin_k)" if top_k else "all" }};
  }
  let own = add_up(thread);
  let last_in = find(settings.top_p * ends[THREADS - 1u], own, thread);
{% endif %}
{% set x = stage[-1] %}
  if (group.x == 0u && thread == 0u) {
    work.bin_{{ x }} = last_in.index;
    work.rest_{{ x }} = last_in.rest;
  }
  for (var i = begin + thread; i < end; i += THREADS) {
    let distance = distances[i];
    if (distance < OUT && distance / BINS == last_in.index) { atomicAdd(&work.ids_{{ x }}[distance % BINS], 1u); }
  }
{% elif stage == "sums" %}
  var cut = OUT;
  var ties_in = 0.0;
{% if top_k %}
  let of_k = cut_of_k(thread);
  cut = of_k.index;
  ties_in = of_k.rest;
{% endif %}
{% if top_p %}
  for (var i = 0u; i < OWN; i++) {
    let place = thread * OWN + i;
    measures[i] = f32(atomicLoad(&work.ids_p[place])) * weight(work.bin_p * BINS + place);
  }
  let of_p = find(work.rest_p, add_up(thread), thread);
  // the whole bin where rounding has put its end out of reach
  let cut_p = work.bin_p * BINS + of_p.index;
  let ties_p = select(max(1.0, ceil(of_p.rest / weight(cut_p))), 0.0, of_p.index == BINS);
  if (cut_p < cut || (cut_p == cut && ties_p < ties_in)) {
    cut = cut_p;
    ties_in = ties_p;
  }
{% endif %}
  if (group.x == 0u && thread == 0u) {
    work.cut = cut;
    work.ties_in = ties_in;
  }
  var sum = 0.0;
  var ties = 0.0;
  for (var i = begin + thread; i < end; i += THREADS) {
    let distance = distances[i];
    sum += select(0.0, weight(distance), distance < cut);
    ties += select(0.0, 1.0, distance == cut && cut < OUT);
  }
  accumulate(sum, thread);
  if (thread == 0u) { work.sums[group.x] = ends[THREADS - 1u]; }
  accumulate(ties, thread);
  if (thread == 0u) { work.ties[group.x] = u32(ends[THREADS - 1u]); }
{% else %}
  let cut = work.cut;
  let of_tie = weight(cut);
  // which part: a thread for each
  let number = min(thread, PARTS - 1u);
  let is_part = thread < PARTS;
  let part_ties = select(0.0, f32(work.ties[number]), is_part);
  accumulate(part_ties, thread);
  let before = end_before(thread);
  let part_sum = select(0.0, work.sums[number], is_part) + clamp(work.ties_in - before, 0.0, part_ties) * of_tie;
  accumulate(part_sum, thread);
  var goal = f32(step.draw) / {{ sampling.draws }}.0 * ends[THREADS - 1u];
  let part = thread_at(goal, part_sum, thread);
  goal -= end_before(part);
  if (thread == part) { ties_before = before; }
  workgroupBarrier();
  let ties_in = work.ties_in - ties_before;  // of the part
  // which of its ids: OWN neighbours for each thread
  let its_begin = min(part * PER + thread * OWN, SIZE);
  let its_end = select(min(its_begin + OWN, min((part + 1u) * PER, SIZE)), its_begin, part == THREADS);
  var sum = 0.0;
  var own_ties = 0.0;
  for (var i = its_begin; i < its_end; i++) {
    let distance = distances[i];
    sum += select(0.0, weight(distance), distance < cut);
    own_ties += select(0.0, 1.0, distance == cut && cut < OUT);
  }
  accumulate(own_ties, thread);
  var tie = end_before(thread);
  sum += clamp(ties_in - tie, 0.0, own_ties) * of_tie;
  accumulate(sum, thread);
  let chosen = thread_at(goal, sum, thread);
  if (thread == chosen || (thread == 0u && chosen == THREADS)) {
    var id = {{ fallback }}u;
    var rest = max(goal - end_before(thread), 0.0);
    for (var i = its_begin; i < its_end; i++) {
      let distance = distances[i];
      let at_cut = distance == cut && cut < OUT;
      if (rest >= 0.0 && (distance < cut || (at_cut && tie < ties_in))) {
        id = i;
        rest -= weight(distance);
      }
      tie += select(0.0, 1.0, at_cut);
    }
    token[0] = id;
  }
{% endif %}
}
