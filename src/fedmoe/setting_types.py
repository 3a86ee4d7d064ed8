"""Values as a config may hold them: a boolean or a text is no number, infinity is not one, and paths are absolute."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from fedmoe.paths import expanded

Int = Annotated[int, Field(strict=True)]
PositiveInt = Annotated[int, Field(strict=True, gt=0)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
Float = Annotated[float, Field(strict=True)]  # may be NaN: who uses it checks its range, and says more
PositiveFloat = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
NonNegativeFloat = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Fraction = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
# Absolute, so that the config which a run records means the same files wherever it is read again.
FilePath = Annotated[Path, AfterValidator(lambda path: expanded(path).absolute())]
