"""Compiled kernels, one pipeline per variant."""

import asyncio
from collections.abc import Callable, Iterable

from stepwell.errors import UsageError
from stepwell.gpu.device import Device
from stepwell.kernels import layout_of, render
from stepwell.launch.recorder import Variant


class KernelCache:
    """Builds pipelines asynchronously and in parallel; a variant asked for twice is compiled once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pipelines: dict[Variant, int] = {}
        self._building: dict[Variant, asyncio.Task[int]] = {}

    def __len__(self) -> int:
        return len(self._pipelines)

    def __getitem__(self, variant: Variant) -> int:
        """The pipeline of a variant that ``ensure`` has built."""
        try:
            return self._pipelines[variant]
        except KeyError:
            raise UsageError(f"{variant} is not compiled yet: await ensure() before the launch.") from None

    def missing(self, variants: Iterable[Variant]) -> list[Variant]:
        return sorted({variant for variant in variants if variant not in self._pipelines}, key=str)

    async def ensure(self, variants: Iterable[Variant], progress: Callable[[int, int], None] | None = None) -> None:
        """Compile what is missing.  Raises ShaderError; ``progress`` gets (kernels done, kernels in total)."""
        missing = self.missing(variants)
        done = 0

        async def build(variant: Variant) -> None:
            nonlocal done
            task = self._building.get(variant)
            if task is None:
                task = self._building[variant] = asyncio.ensure_future(self._compile(variant))
            try:
                self._pipelines[variant] = await task
            finally:
                self._building.pop(variant, None)
            done += 1
            if progress is not None:
                progress(done, len(missing))

        # a failure is raised after every build has settled, so that no task is left behind
        results = await asyncio.gather(*(build(variant) for variant in missing), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _compile(self, variant: Variant) -> int:
        code = render(variant.kernel, dict(variant.constants))
        return await self._device.create_pipeline(code, layout_of(code), str(variant))

    def clear(self) -> None:
        for pipeline in self._pipelines.values():
            self._device.destroy(pipeline)
        self._pipelines.clear()
