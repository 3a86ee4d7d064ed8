"""Numbers as a config may hold them: a boolean or a text is no number, and infinity is not one either."""

from typing import Annotated

from pydantic import Field

Int = Annotated[int, Field(strict=True)]
PositiveInt = Annotated[int, Field(strict=True, gt=0)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
Float = Annotated[float, Field(strict=True)]  # may be NaN: who uses it checks its range, and says more
PositiveFloat = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
NonNegativeFloat = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Fraction = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
