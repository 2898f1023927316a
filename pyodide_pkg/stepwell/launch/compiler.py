"""Compiles variants to pipelines: several at a time, each once, however many steps wait for it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepwell.gpu.device import Device, Layout
from stepwell.gpu.program import Scalar
from stepwell.kernels import fields_of, layout_of, render
from stepwell.step.recorder import Variant


class Kernel(NamedTuple):
    """A compiled variant: its pipeline, its layout, and the scalars of the step that it reads (None: no block)."""

    pipeline: int
    layout: Layout
    fields: Scalar | None


class Compiler:
    """Compiles on ``device``, into ``kernels``; with ``immediates`` kernels read the step's scalars from immediates."""

    def __init__(self, device: Device, kernels: dict[Variant, Kernel], *, immediates: bool) -> None:
        self._device = device
        self._kernels = kernels
        self._immediates = immediates
        self._building: dict[Variant, asyncio.Task[None]] = {}

    async def build(self, missing: Sequence[Variant], progress: Callable[[int, int], None] | None) -> None:
        """Compile ``missing``, in parallel; raises ShaderError.  ``progress`` gets (kernels done, kernels in total)."""
        done = 0

        async def build(variant: Variant) -> None:
            nonlocal done
            task = self._building.get(variant)
            if task is None:
                task = self._building[variant] = asyncio.ensure_future(self._compile(variant))
                task.add_done_callback(_retrieve)
            await asyncio.shield(task)  # another step may be waiting for it when this one is cancelled
            done += 1
            if progress is not None:
                progress(done, len(missing))

        # a failure is raised after every build has settled, so that no task is left over
        results = await asyncio.gather(*(build(variant) for variant in missing), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _compile(self, variant: Variant) -> None:
        try:
            code = render(variant.kernel, {**dict(variant.constants), "immediates": self._immediates})
            layout = layout_of(code)
            pipeline = await self._device.create_pipeline(code, layout, str(variant))
            self._kernels[variant] = Kernel(pipeline, layout, fields_of(code))
        finally:
            del self._building[variant]


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Take the error of a failed build: every task that waited for it may have been cancelled."""
    if not task.cancelled():
        task.exception()
