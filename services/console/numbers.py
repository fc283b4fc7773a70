"""Numbers as people read them."""

NOTHING = "–"


def size(num_bytes: float) -> str:
    """Bytes: 512 B, 9.5 kB, 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def short(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
