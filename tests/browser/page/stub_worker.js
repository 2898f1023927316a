// Stands in for web/worker.js in tests of the page alone: speaks the same messages, decodes nothing. What it answers
// follows from the request, so that a test can foretell it; some prompts ask for trouble.

const environment = {
  adapter: {
    vendor: "stub",
    architecture: "none",
    description: "",
    is_fallback: SOFTWARE,
    is_software: SOFTWARE,
    subgroup_size: 32,
  },
  features: ["shader-f16"],
  browser: "Stub 1.0",
  flags: [],
  cross_origin_isolated: self.crossOriginIsolated,
  timer_resolution_us: 5,
  pyodide: "0.0.0",
  stepwell: "0.0.0",
};
const PROMPT_TOKENS = 60;
const KV_BYTES = 768; // of one position in one KV tensor
const CREATED = { bucket: 40, adaptive: 0 };
/** ms per token of the runs without a shared pass, in the order in which they come; all others take 10. */
const SLOW_MS = [20, 26, 24];
let slowRuns = 0;

const MAIN = { shared_pass: false, bind_group_cache: false, replay: false, params: "uniform_pool", readback_depth: 0 };

let cancelled = false;
const post = (type, fields) => self.postMessage({ type, ...fields });
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const fail = (code, message, phase) => post("error", { code, message, phase });

const handlers = {
  async boot({ tuning }) {
    post("phase", { phase: "runtime", text: "Starting Python" });
    if (tuning === "corrupt") post("tuning", { notices: ["It cannot be read."], outcome: null, text: null });
    post("environment", {
      environment,
      ...(OLDER ? {} : launchListing()),
      boot_ms: 1234,
      limits: { maxStorageBufferBindingSize: 2 ** 31, maxBufferSize: 2 ** 32 },
      policies: [
        {
          name: "bucket",
          summary: "fixed limits",
          options: [
            option("era", "choice", "B", { choices: ["A", "B"] }),
            option("limits", "limits", "4194304:20, 8388608:10"),
          ],
        },
        {
          name: "adaptive",
          summary: "follows the high-water mark",
          options: [
            option("window", "int", "8", { minimum: 1, maximum: 256 }),
            option("growth", "float", "1.25", { minimum: 1.01, maximum: 2 }),
            option("stagger", "bool", "true"),
          ],
        },
      ],
      kv_modes: [
        { name: "grow", summary: "a larger tensor at every token" },
        { name: "static", summary: "allocated once" },
      ],
      workloads: [{ name: "kv64", summary: "64 growing tensors", tensors: 64, position_bytes: 2048 }],
      ...(OLDER ? {} : { synthetic: [{ name: "synthetic:m", title: "M", sizes: { Q4_0: 5 << 20, F16: 16 << 20 } }] }),
    });
    post("phase", { phase: "ready", text: "Ready" });
  },

  async load({ model }) {
    post("phase", { phase: "weights", text: `Loading ${model.name}` });
    if (model.name === "broken.gguf")
      return fail("BadFile", "broken.gguf: 3 B; the header needs 24 B. Download it again.", "weights");
    post("progress", { phase: "weights", done: 1 << 20, total: 2 << 20, unit: "bytes" });
    await pause(20);
    const shape = {
      architecture: "llama",
      layers: 30,
      kv_heads: 3,
      head_dim: 64,
      context_length: 8192,
      bytes: 2 << 20,
    };
    post("model", {
      model: {
        name: model.name,
        sha256: model.sha256 ?? null,
        ...shape,
        tensor_types: { Q4_1: 210 },
        has_chat_template: true,
      },
    });
    post("phase", { phase: "ready", text: "Ready" });
  },

  async run({ request }) {
    cancelled = false;
    if (request.prompt === "lose the device") return fail("DeviceLost", "The device was lost.", "decode");
    if (request.prompt === "ask too much")
      return fail("ContextFull", "60 + 9,000 positions; the model has 8,192. Ask for fewer tokens.", "prefill");
    if (request.tune) {
      post("phase", { phase: "tuning", text: "Tuning kernels" });
      post("progress", { phase: "tuning", done: 1, total: 5, unit: "products" });
      const product = { kernel: "matvec", before: "norm", after: "swiglu", format: "u4", k: 64, n: 2048, subgroup: 32 };
      const choice = { ...product, spread: { wide: 8, per: 2 }, us: 27.5, default_us: 31 };
      const outcome = { products: 5, measured: 4, faster: 1, complete: false, choices: [choice] };
      post("tuning", { notices: ["matvec 1 is wrong"], outcome, text: `tuned for ${request.tune_ms}` });
    }
    const tokens = [];
    const isSlow = request.launch?.shared_pass === false;
    const pace = isSlow ? SLOW_MS[slowRuns++ % SLOW_MS.length] : 10;
    post("phase", { phase: "prefill", text: "Reading the prompt" });
    for (let index = 0; index < request.tokens && !cancelled; index += 1) {
      const token = entry(request, index, pace);
      tokens.push(token);
      const by_role = { weights: 1 << 20, kv: 60 * token.kv_class_bytes };
      post("token", { text: request.workload ? "" : `w${index} `, token, by_role });
      post("pool", { classes: classesAt(index), text: "" });
      if (index === 0) post("phase", { phase: "decode", text: "Decoding" });
      await pause(request.prompt === "slowly" ? 30 : 0);
    }
    if (!request.workload) post("token", { text: "end", token: null, by_role: {} });
    post("pool", { classes: classesAt(tokens.length), text: `${request.policy} explains itself.` });
    if (request.pool_trace) post("pool_trace", { text: `stepwell-trace 1 {"policy": "${request.policy}"}\nb 1\n. 1\n` });
    if (request.trace) post("trace", { text: JSON.stringify({ traceEvents: [{ name: "encode", ph: "X" }] }) });
    post("done", { record: record(request, tokens) });
    post("phase", { phase: "ready", text: "Ready" });
  },

  async what_if({ file, question }) {
    cancelled = false;
    post("phase", { phase: "what-if", text: `Reading ${file.name}` });
    const text = await file.text();
    if (!text.startsWith("stepwell-trace"))
      return fail("BadTrace", `the file begins with '${text}'. Is it a trace?`, "what-if");
    for (let done = 1; done <= 40 && !cancelled; done += 1) {
      post("progress", { phase: "what-if", done, total: 40, unit: "events" });
      await pause(text.includes("slowly") ? 30 : 0);
    }
    post("verdict", { answer: cancelled ? null : verdict(file.name, question) });
    post("phase", { phase: "ready", text: "Ready" });
  },

  async cancel() {
    cancelled = true;
  },
};

function option(name, kind, initial, more = {}) {
  return {
    name,
    kind,
    default: initial,
    summary: `what ${name} does`,
    minimum: null,
    maximum: null,
    choices: [],
    ...more,
  };
}

/** Some of the package's launch options, of every kind, and two arms. */
function launchListing() {
  return {
    launch_options: [
      option("shared_pass", "bool", true),
      option("bind_group_cache", "bool", true),
      option("replay", "bool", true),
      option("submit_every", "int", 0),
      option("submit_every_ms", "float", 0, { minimum: 0, maximum: 60000 }),
      option("params", "choice", "auto", { choices: ["auto", "uniform_pool", "call_site", "immediates"] }),
      option("readback_depth", "int", null, { minimum: 0, maximum: 64 }),
      option("bind_groups", "int", 2048, { minimum: 1 }),
    ],
    ablation: [
      { name: "main", launch: MAIN },
      { name: "+shared pass", launch: { ...MAIN, shared_pass: true } },
    ],
  };
}

/** A pool of 64 tensors in as many classes, of which the smallest empties at the fourth token; and one activation. */
function classesAt(index) {
  const figures = { hits: 3 * index, misses: index, keeps: 1, evicted: 0 };
  const kv = Array.from({ length: 64 }, (_, i) => {
    const gone = i === 0 && index >= 4;
    const size = Math.round((4 << 20) * 1.25 ** (i / 64));
    return { role: "kv", size, live: gone ? 0 : 1, free: gone ? 0 : 1, ...figures, evicted: gone ? 2 : 0 };
  });
  return [...kv, { role: "activation", size: 6144, live: 2, free: 1, ...figures, keeps: null }];
}

function entry(request, index, pace) {
  const position = (request.workload ? request.start : PROMPT_TOKENS) + index;
  const kib = 1024 * (position * KV_BYTES <= 48 * 1024 ? 48 : 64);
  const created = request.kv === "static" && request.workload ? 0 : CREATED[request.policy];
  const ms = index === 0 ? 5000 : request.policy === "bucket" ? 30 : pace;
  const differs = request.policy === "bucket" || request.launch?.shared_pass === false;
  const wrong = request.prompt === "differ" && differs && index === 3;
  const names =
    "submits bind_groups_created bind_groups_reused copies uploads upload_bytes readbacks readback_bytes buffers_destroyed bytes_destroyed pool_hits pool_misses";
  return {
    index,
    position,
    id: wrong ? 9999 : 100 + index,
    ms,
    encode_ms: 1,
    wait_ms: ms - 1,
    launches: 244,
    passes: 1,
    ...Object.fromEntries(names.split(" ").map((name) => [name, 1])),
    ...(OLDER ? {} : launchCounters(request, index)),
    buffers_created: created,
    bytes_created: created * kib,
    kv_class_bytes: kib,
    reserved_bytes: (1 << 20) + 60 * kib,
    in_use_bytes: (1 << 20) + 30 * kib,
  };
}

function launchCounters({ launch = {}, digest, gpu_time: gpuTime, prompt }, index) {
  const off = launch.shared_pass === false;
  const reasons = ["prefill", "recorded"];
  const refused = launch.replay === false ? "off" : (reasons[index] ?? null);
  const wrong = prompt === "logits" && off && index === 2;
  return {
    passes: off ? 244 : 1,
    encoders: 1,
    syncs: 1,
    bind_groups_created: off ? 244 : 0,
    bind_groups_reused: off ? 0 : 244,
    bind_groups_evicted: 0,
    uploads: off ? 244 : 0,
    uploads_skipped: off ? 0 : 244,
    immediates: off ? 0 : 1,
    immediates_bytes: off ? 0 : 16,
    replayed: refused && refused !== "recorded" ? 0 : 1, // what is recorded is replayed once, to compare
    refused,
    gpu_ms: gpuTime ? 2.5 : null,
    ...(digest ? { digest: `${wrong ? 1 : 0}${index}`.padStart(16, "0") } : {}),
  };
}

function launchSummary({ launch = {} }, tokens) {
  return {
    options: {
      ...{ shared_pass: true, bind_group_cache: true, skip_uploads: true, submit_every: 0, submit_every_ms: 0 },
      ...{ params: "auto", replay: true, readback_depth: null, bind_groups: 2048, variants_per_node: null },
      ...{ width_ladder: true, kernels: "auto", fused: "auto", subgroups: "auto", dot4: "auto", f16: "auto", tuned: true, ...launch },
    },
    params: "immediates",
    kernels: { kernels: "split", fused: true, subgroups: 32, dot4: true, f16: true },
    identity_rate: 0.984,
    plans: { recorded: 2, replayed: tokens.filter(({ replayed }) => replayed).length, refused: {}, invalidated: 1 },
    bind_groups: { size: 488, evicted: 3 },
    variants: { matmul: { shapes: 4, evicted: 2 }, norm: { shapes: 1, evicted: 0 } },
    workspace_bytes: 3 << 20,
    tuned: [],
  };
}

/** What a replay says: two settings, of which the second is to be taken. */
function verdict(trace, { budget_mib: budget, create_us: each }) {
  const figures = { max_creates_in_token: 64, peak_bytes: 2388 * 2 ** 20, steady_mib_per_token: 580, ms_per_token: 51.72 };
  const bucket = {
    ...{ ...figures, label: "bucket", policy: "bucket", options: {}, creates_per_token: 52.586, mib_per_token: 580.69 },
    ...{ steady_creates_per_token: 52.582, saved_ms_per_token: 0, series: [[3, 44], [4, 44], [5, 54]] },
    hurting: [{ why: "class 16.0 MiB (kv): 64 buffers wanted per token, the class keeps 10: 54 are created anew" }],
  };
  const better = {
    ...{ ...bucket, label: "adaptive growth=2", policy: "adaptive", options: { growth: "2" }, hurting: [] },
    ...{ steady_creates_per_token: 0.166, ms_per_token: 0.13, saved_ms_per_token: 51.59, series: [[3, 0], [4, 1], [5, 0]] },
  };
  return {
    ...{ trace, unit: "token", runs: 7168, create_us: each ?? 100, create_us_per_mib: 80, costs_from: "assumed; --create-us" },
    ...{ budget_bytes: budget === null ? null : budget * 2 ** 20, baseline: bucket, baseline_from: "as recorded" },
    code: trace.startsWith("onnxruntime") ? 'stepwell.attach({policy: "adaptive"})' : null, // as of another runtime's trace
    ...{ settings: [better, bucket], over_budget: budget === null ? [] : ["pow2"], recommended: better.label },
    sentence: "Take adaptive growth=2: it saves about 51.6 ms per token.",
  };
}

/** What two kernels took; on a CPU adapter by a clock that was too coarse to tell. */
function kernelTable() {
  const net = { us_per_token: 600, net_us_per_token: 400, gb_s: SOFTWARE ? null : 2000 };
  const row = { node: "gate_up", kernel: "matvec", shape: "576 x 3072", format: "u4m", launches: 30, bytes_per_launch: 3 << 20 };
  return {
    ...{ steps: 24, position: 65, launches_per_token: 31, clock_us: SOFTWARE ? 65.536 : 0.032, coarse_clock: SOFTWARE },
    ...{ pass_us: 8, us_per_token: 700, net_us_per_token: 500, plain_read_gb_s: 4000, plain_read_bytes: 1 << 30 },
    weights: { launches: 30, bytes_per_token: 90 << 20, ...net, share_of_plain_read: SOFTWARE ? null : 0.5 },
    rows: [
      { ...row, us_per_launch: 20, net_us_per_launch: 13.3, ...net, share: 0.8 },
      {
        ...{ node: "argmax", kernel: "argmax", shape: "", format: "", launches: 1, us_per_launch: 100 },
        ...{ net_us_per_launch: 100, us_per_token: 100, net_us_per_token: 100, bytes_per_launch: 0, gb_s: null },
        share: 0.2,
      },
    ],
  };
}

function record(request, tokens) {
  return {
    ...(request.kernel_times ? { kernels: kernelTable() } : {}),
    ...(OLDER ? {} : { launch: launchSummary(request, tokens) }),
    schema: OLDER ? 1 : 2,
    scenario: { model: request.workload ?? "stub", sha256: null, ...request },
    environment,
    prompt_ids: request.workload ? [] : Array(PROMPT_TOKENS).fill(1),
    token_ids: tokens.map(({ id }) => id),
    text: request.workload ? "" : `${tokens.map(({ index }) => `w${index} `).join("")}end`,
    finish_reason: cancelled ? "cancelled" : "length",
    ttft_ms: tokens[0]?.ms ?? null,
    tokens,
    memory: { peak_reserved_bytes: Math.max(0, ...tokens.map((token) => token.reserved_bytes)), by_role: {} },
  };
}

self.onmessage = ({ data }) => handlers[data.type](data);
