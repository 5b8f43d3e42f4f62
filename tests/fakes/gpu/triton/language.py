"""`triton.language` of the stand-in."""

constexpr = int
