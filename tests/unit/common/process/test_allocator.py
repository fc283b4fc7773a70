import subprocess
import sys

import pytest

CHURN = """
import resource
from tidemill.common.process.allocator import keep_freed_memory

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        written = [b"x" * (8 << 20) for _ in range(8)]
        del written
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

count_faults()  # of memory that was not there before
by_default = count_faults()
keep_freed_memory()
count_faults()
print(by_default, count_faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other allocators")
def test_memory_that_was_freed_is_there_for_the_next_tensor():
    output = subprocess.run([sys.executable, "-c", CHURN], check=True, capture_output=True, text=True).stdout
    by_default, kept = map(int, output.split())
    assert by_default > 1000, "this allocator keeps what is freed anyway: the test says nothing"
    assert kept < 100
