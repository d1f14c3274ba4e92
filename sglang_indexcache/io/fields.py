"""Types of fields that files, journals and answers share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AllowInfNan, Field

Finite = Annotated[float, AllowInfNan(False)]
Count = Annotated[int, Field(ge=0)]
