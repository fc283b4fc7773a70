"""The `images` section: the bounds of pictures in prompts, and where they may come from."""

from typing import Literal

from pydantic import Field

from tidemill.common.config.section import Rules, Section


class ImagesConfig(Section):
    """Pictures in prompts; docs/images.md has formats and families of models. `{}` takes the defaults."""

    min_pixels: int | None = Field(None, ge=1, le=1 << 26)
    """Smaller pictures are enlarged to so many pixels, by families that take a picture as large as it is;
    null: as the model's processor does."""
    max_pixels: int = Field(1_003_520, ge=1, le=1 << 26)
    """Larger pictures are reduced to so many pixels."""
    max_per_prompt: int = Field(8, ge=1, le=256)
    """Most pictures of a prompt, and of the history of a session."""
    max_file_mb: float = Field(20.0, gt=0.0, le=1024.0)
    """Larger files, and answers of a URL, are refused."""
    fetch_timeout_s: float = Field(30.0, gt=0.0, le=3600.0)
    """Longest time for a picture of a URL."""
    private_addresses: bool = False
    """Whether URLs may lead to private, loopback and link-local addresses."""
    broken: Literal["drop", "error"] = "drop"
    """Treatment of rows whose pictures cannot be read: leave them out, or refuse the data."""

    def rules(self) -> Rules:
        if self.min_pixels is not None and self.min_pixels > self.max_pixels:
            yield f"min_pixels ({self.min_pixels}) exceeds max_pixels ({self.max_pixels})"
