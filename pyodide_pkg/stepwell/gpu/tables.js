// The objects behind the handles, and which plans hold on to which of them.

let nextHandle = 1; // of all devices, never reused: Python keys its caches by these

class Tables {
  constructor() {
    this.buffers = new Map(); // handle -> GPUBuffer
    this.pipelines = new Map(); // handle -> { pipeline, layout, first, count }
    this.bindGroups = new Map(); // handle -> { group, buffers: [handle, …] }
    this.plans = new Map(); // handle -> Plan
    this.plansOf = new Map(); // handle of another object -> Set of the plans that die with it
  }

  add(table, object) {
    const handle = nextHandle++;
    table.set(handle, object);
    return handle;
  }

  buffer(handle) {
    return this.buffers.get(handle) ?? missing("buffers", handle);
  }

  pipeline(handle) {
    return this.pipelines.get(handle) ?? missing("pipelines", handle);
  }

  bindGroup(handle) {
    return this.bindGroups.get(handle) ?? missing("bind groups", handle);
  }

  plan(handle) {
    const plan = this.plans.get(handle) ?? missing("plans", handle);
    if (plan.killer) {
      throw failed("UsageError", `plan ${handle} refers to ${plan.killer}, which was destroyed: record it anew`);
    }
    return plan;
  }

  addPlan(words) {
    const plan = new Plan(words, this);
    for (const handle of plan.handles) {
      const plans = this.plansOf.get(handle);
      if (plans) plans.add(plan);
      else this.plansOf.set(handle, new Set([plan]));
    }
    return this.add(this.plans, plan);
  }

  destroy(handle) {
    const buffer = this.buffers.get(handle);
    const plan = this.plans.get(handle);
    if (buffer) {
      buffer.destroy();
      this.buffers.delete(handle);
    } else if (plan) {
      this.plans.delete(handle);
      this.forget(plan, handle);
    } else if (!this.pipelines.delete(handle) && !this.bindGroups.delete(handle)) {
      throw failed("UsageError", `handle ${handle} is not alive: destroyed twice, or never created`);
    }
    if (this.plansOf.size) for (const dependent of this.plansOf.get(handle) ?? []) this.forget(dependent, handle);
  }

  // A plan that will not run again lets go of its objects.
  forget(plan, killer) {
    if (plan.killer) return;
    for (const handle of plan.handles) {
      const plans = this.plansOf.get(handle);
      plans.delete(plan);
      if (!plans.size) this.plansOf.delete(handle);
    }
    plan.end(killer);
  }

  // The number of live objects of each kind, in the order that js_device.py names them.
  sizes() {
    return [this.buffers.size, this.pipelines.size, this.bindGroups.size, this.plans.size];
  }

  clear() {
    for (const buffer of this.buffers.values()) buffer.destroy();
    for (const table of [this.buffers, this.pipelines, this.bindGroups, this.plans, this.plansOf]) table.clear();
  }
}

// A resolved program. `killer` is the handle of the object whose destruction ended it.
class Plan {
  constructor(words, tables) {
    if (words[0] !== SCALARS) throw failed("UsageError", "a plan begins with SCALARS: every replay brings its own");
    this.words = words;
    this.objects = new Array(words.length).fill(null);
    this.copiesOut = resolve(words, words.length, this.objects, tables);
    this.handles = handlesOf(words, this.objects, tables);
    this.killer = 0;
  }

  end(killer) {
    this.killer = killer;
    this.handles = this.words = this.objects = null;
  }
}

// The handles in a resolved program and of the buffers that its bind groups bind.
function handlesOf(words, objects, tables) {
  const handles = new Set();
  for (let i = 0; i < words.length; i++) {
    if (!objects[i]) continue;
    handles.add(words[i]);
    for (const buffer of tables.bindGroups.get(words[i])?.buffers ?? []) {
      tables.buffer(buffer);
      handles.add(buffer);
    }
  }
  return handles;
}

function missing(kind, handle) {
  throw failed("UsageError", `handle ${handle} is not one of the live ${kind}`);
}
