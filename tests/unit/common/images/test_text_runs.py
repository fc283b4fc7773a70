"""A run of text imports nothing of pictures."""

import subprocess
import sys

OF_PICTURES = ("door", "fetching", "processor")
"""Modules of `common/images` that only runs with pictures need."""


def test_services_of_a_text_run_load_neither_pillow_nor_what_takes_pictures_in():
    modules = "tidemill.common.data.prompt_lengths, tidemill.services.console.check.model_folder"
    program = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert "PIL" not in loaded
    assert not {f"tidemill.common.images.{name}" for name in OF_PICTURES} & set(loaded)
    program = "import sys, tidemill.services.trainer.service; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert "tidemill.services.trainer.batch.prompts" in loaded
    assert not {f"tidemill.common.images.{name}" for name in OF_PICTURES} & set(loaded)
    assert "tidemill.services.trainer.batch.row_pictures" not in loaded
