"""What carries a message needs little."""

import subprocess
import sys


def test_the_process_of_a_message_does_not_load_torch() -> None:
    code = "import mpfedcl.flower_app, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
