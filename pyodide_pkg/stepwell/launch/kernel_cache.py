"""Kernel variants: compiled once, kept per node of the model's graph, the least recently used given up.

A *node* is an operation of the graph ("qkv", "attention", …; layers share it, their shapes are equal).  A node's
*variant* is keyed by its shape class (``shapes.py``; the width in tokens comes first) and has the pipelines that its
launches use and the workspaces that they write.  A pipeline may serve variants of several nodes: it is destroyed with
the last one.  Launches without a node belong to node "" and shape ().

Each node keeps at most ``variants_per_node`` variants, so that a busy node cannot push out another one's only variant.
Two are exempt: what the present step uses, and the decode variant (the most recently used of one token), which must
outlive a prompt of many shapes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from stepwell.errors import DeviceLost, UsageError
from stepwell.gpu.device import Device
from stepwell.launch.compiler import Compiler, Kernel
from stepwell.memory.buffer import Buffer, Role
from stepwell.memory.pool import BufferPool
from stepwell.step.recorder import Variant

Shape = tuple[int, ...]
Use = tuple[str, Shape, Variant]
"""(node, shape class, variant) of a launch."""
OnEvict = Callable[[frozenset[int], frozenset[int]], None]
"""A function called with the handles of pipelines and buffers that are about to be destroyed."""
_NO_SESSION = 0


@dataclass(slots=True)
class NodeVariant:
    """One variant of a node."""

    pipelines: set[Variant] = field(default_factory=set)
    workspaces: dict[str, Buffer] = field(default_factory=dict)
    last: int = 0  # the step that used it last


class KernelCache:
    """``immediates``: kernels read the step's numbers from immediates.  ``variants_per_node`` 0: no bound.

    ``on_evict`` runs before anything is destroyed or released, for whoever holds on to it (a recorded plan has the
    pipelines and buffers of its variants baked in).  Nobody is told when the device was lost: everything is gone then.
    """

    def __init__(
        self,
        device: Device,
        pool: BufferPool,
        *,
        immediates: bool,
        variants_per_node: int,
    ) -> None:
        if variants_per_node < 0:
            raise ValueError(f"{variants_per_node} variants per node; 0 or more, 0 for no bound")
        self._device = device
        self._pool = pool
        self.bound = variants_per_node
        self._nodes: dict[str, dict[Shape, NodeVariant]] = {}
        self._evicted: Counter[str] = Counter()
        self._kernels: dict[Variant, Kernel] = {}
        self._users: Counter[Variant] = Counter()  # how many entries use a pipeline
        self._unused: set[Variant] = set()  # lost their last user; the present step may bring another one
        self._compiler = Compiler(device, self._kernels, immediates=immediates)
        self._held: Counter[tuple[str, Shape]] = Counter()  # of steps that wait for their kernels
        self._step = 1
        self._generation = self._pool.inventory.generation
        self.on_evict: list[OnEvict] = []

    def __len__(self) -> int:
        """The number of pipelines."""
        return len(self._kernels)

    def __getitem__(self, variant: Variant) -> Kernel:
        """The kernel of a variant that ``ensure`` has built."""
        try:
            return self._kernels[variant]
        except KeyError:
            raise UsageError(f"{variant} is not compiled yet: await ensure() before the launch.") from None

    # ---- a step -----------------------------------------------------------------------------------------------------

    def workspace(self, node: str, shape: Shape, label: str, nbytes: int) -> Buffer:
        """The buffer of a variant that ``label`` names: leased at the first call, the same one from then on.

        Its contents are undefined at the beginning of every step.
        """
        self._forget_lost()
        entries = self._nodes.setdefault(node, {})
        entry = entries.get(shape)
        if entry is None:
            self._evict(node, 1)  # first, so that its memory can serve the new one
            entry = NodeVariant()
        entry.last = self._step
        buffer = entry.workspaces.get(label)
        if buffer is None:
            # all sessions use it in turn: as the lease of one, its memory would come back to that one uncleared
            buffer = self._pool.acquire(nbytes, Role.WORKSPACE, label, session=_NO_SESSION)
            entry.workspaces[label] = buffer
            entries[shape] = entry  # now that it has something
        elif nbytes > buffer.requested:
            raise UsageError(
                f"workspace {label!r} of {node} {shape} has {buffer.requested:,} B, {nbytes:,} B are asked for now. "
                "Size it by the shape class, not by the step."
            )
        return buffer

    def missing(self, uses: Iterable[Use | Variant]) -> list[Variant]:
        """The variants of ``uses`` that are not compiled yet."""
        self._forget_lost()
        return sorted({variant for _, _, variant in _uses(uses)} - self._kernels.keys(), key=str)

    async def ensure(self, uses: Iterable[Use | Variant], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what ``uses`` lack, in parallel, and ``use`` them.

        Raises ShaderError; ``progress`` gets (kernels done, kernels in total).  A variant without any kernel that
        compiles is not kept.
        """
        uses = _uses(uses)
        keys = {(node, shape) for node, shape, _ in uses}
        self._held.update(keys)
        try:
            while missing := self.missing(uses):  # again: another step may evict while this one waits
                await self._compiler.build(missing, progress)
            self.use(uses)
        except BaseException:
            self._note(use for use in uses if use[2] in self._kernels)
            self._drop([key for key in keys if (entry := self._find(*key)) is not None and not entry.pipelines])
            raise
        finally:
            self._held -= Counter(keys)

    def use(self, uses: Iterable[Use | Variant]) -> None:
        """A step is about to use these, all compiled: call it once per step, with everything the step launches.

        Variants beyond the bound go here.
        """
        self._forget_lost()
        nodes = self._note(_uses(uses))
        for node in nodes:
            self._evict(node)
        self._sweep()
        self._step += 1

    # ---- giving back ------------------------------------------------------------------------------------------------

    def release_workspaces(self) -> None:
        """Give all workspaces back, for a step that was abandoned; the next step leases those that it needs anew.

        When memory ran out, idle workspaces are wanted elsewhere, and the latest ones may have no memory at all.
        Pipelines stay.
        """
        self._forget_lost()
        buffers = [buffer for entry in self._entries() for buffer in entry.workspaces.values()]
        self._announce((), buffers)
        for entry in self._entries():
            entry.workspaces.clear()
        self._free((), buffers)

    def clear(self) -> None:
        """Give everything back.  Safe to call twice, and after the device was lost."""
        self._forget_lost()
        pipelines = [kernel.pipeline for kernel in self._kernels.values()]
        buffers = [buffer for entry in self._entries() for buffer in entry.workspaces.values()]
        self._announce(pipelines, buffers)
        self._forget()
        try:
            self._free(pipelines, buffers)
        except DeviceLost:
            return  # the rest died with the device

    # ---- what there is ----------------------------------------------------------------------------------------------

    @property
    def variants(self) -> list[Variant]:
        """The pipelines that there are."""
        return list(self._kernels)

    @property
    def evictions(self) -> int:
        """Variants given up so far."""
        return self._evicted.total()

    @property
    def workspace_bytes(self) -> int:
        """Reserved bytes of all workspaces."""
        self._forget_lost()
        return sum(buffer.size for entry in self._entries() for buffer in entry.workspaces.values())

    def variants_of(self, node: str) -> Mapping[Shape, NodeVariant]:
        """The variants of ``node`` by shape class, the one used longest ago first."""
        return self._nodes.get(node, {})

    def report(self) -> dict[str, dict[str, int]]:
        """Per node: variants now (``shapes``) and given up so far (``evicted``)."""
        self._forget_lost()
        return {
            node: {"shapes": len(entries), "evicted": self._evicted[node]}
            for node, entries in self._nodes.items()
            if node
        }

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _entries(self) -> Iterable[NodeVariant]:
        return (entry for entries in self._nodes.values() for entry in entries.values())

    def _find(self, node: str, shape: Shape) -> NodeVariant | None:
        return self._nodes.get(node, {}).get(shape)

    def _note(self, uses: Iterable[Use]) -> set[str]:
        """Mark variants as used by the present step; returns their nodes."""
        nodes = set()
        for node, shape, variant in uses:
            entries = self._nodes.setdefault(node, {})
            entry = entries.get(shape)
            if entry is None:
                entry = entries[shape] = NodeVariant()
            entry.last = self._step
            if variant not in entry.pipelines:
                self[variant]  # compiled?
                entry.pipelines.add(variant)
                self._users[variant] += 1
            nodes.add(node)
        return nodes

    def _evict(self, node: str, room: int = 0) -> None:
        """Drop the least recently used variants of ``node`` until ``room`` more fit, as far as that is allowed."""
        entries = self._nodes[node]
        surplus = len(entries) + room - self.bound
        if not self.bound or surplus <= 0:
            return
        by_age = sorted(entries, key=lambda shape: entries[shape].last)
        # a bound of one is one: then the decode variant takes its turn with the others
        decode = next((shape for shape in reversed(by_age) if shape[:1] == (1,)), None) if self.bound > 1 else None
        victims = [
            (node, shape)
            for shape in by_age
            if entries[shape].last != self._step and shape != decode and (node, shape) not in self._held
        ][:surplus]
        self._drop(victims)
        self._evicted[node] += len(victims)

    def _drop(self, keys: Sequence[tuple[str, Shape]]) -> None:
        """Give up whole variants of nodes.  Pipelines that nothing else uses go with ``_sweep``."""
        entries = [self._nodes[node][shape] for node, shape in keys]
        buffers = [buffer for entry in entries for buffer in entry.workspaces.values()]
        self._announce((), buffers)
        for node, shape in keys:
            del self._nodes[node][shape]
        for entry in entries:
            self._users.subtract(entry.pipelines)
            self._unused.update(variant for variant in entry.pipelines if not self._users[variant])
        self._free((), buffers)

    def _sweep(self) -> None:
        """Destroy the pipelines that lost their last user and got no other."""
        unused = [variant for variant in self._unused if not self._users[variant]]
        pipelines = [self._kernels[variant].pipeline for variant in unused]
        self._announce(pipelines, ())
        self._unused.clear()
        for variant in unused:
            del self._kernels[variant], self._users[variant]
        self._free(pipelines, ())

    def _announce(self, pipelines: Sequence[int], buffers: Sequence[Buffer]) -> None:
        if pipelines or buffers:
            for call in self.on_evict:
                call(frozenset(pipelines), frozenset(buffer.id for buffer in buffers))

    def _free(self, pipelines: Sequence[int], buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self._pool.release(buffer)
        for pipeline in pipelines:
            self._device.destroy(pipeline)

    def _forget_lost(self) -> None:
        """Forget what died with a device."""
        if self._generation != self._pool.inventory.generation:
            self._generation = self._pool.inventory.generation
            self._forget()

    def _forget(self) -> None:
        for entries in self._nodes.values():
            entries.clear()
        self._kernels.clear()
        self._users.clear()
        self._unused.clear()


def _uses(uses: Iterable[Use | Variant]) -> list[Use]:
    """Uses as given; a bare variant is one of node ""."""
    return [("", (), use) if isinstance(use, Variant) else use for use in uses]
