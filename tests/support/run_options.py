"""A run option that there is not, for the tests that look for it everywhere."""

from stepwell.options import OptionKind
from stepwell.page.run_options import RunOption, Where

MADE_UP = RunOption(
    name="made_up",
    kind=OptionKind.INT,
    default=7,
    minimum=1,
    maximum=9,
    summary="nobody asked for it",
    where=Where.MODEL,
    lacks="made-up part",
    form="sampling",
    label="Made up",
)
