"""Worker process that decodes images: a JSON request per input line, a JSON answer per output
line.

An image is untrusted, and its decoders are C libraries. So they run in a process whose memory and
time the operating system bounds and whose crash does not affect the server. The arguments are the
bytes of address space that requests may need, and the seconds of processor time of each request,
rounded up to the next second. Without enough memory the process ends.
"""

import base64
import contextlib
import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .decode import decode, import_pillow
from .errors import ImageError
from .pixels import patches
from .rule import ImageRule


def answer_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Decode and cut an image.

    Args:
        request: `image` (base64), `rule` (fields of `ImageRule.to_json`) and `max_pixels`.

    Returns:
        `patches` (base64), `rows` and `columns`, or `error`.
    """
    rule = ImageRule.from_json(request["rule"])
    try:
        image = decode(base64.b64decode(request["image"]), request["max_pixels"])
        rows, columns = rule.grid(*image.size)
        encoded = base64.b64encode(patches(image, rule).data)
    except ImageError as error:
        return {"error": str(error)}
    return {"patches": encoded.decode(), "rows": rows, "columns": columns}


def address_space() -> int:
    """Bytes of address space in use."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()


def main() -> None:
    memory = int(sys.argv[1])
    seconds = int(sys.argv[2])
    import_pillow().MAX_IMAGE_PIXELS = None  # `decode` has its own limit
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # macOS has neither /proc nor this limit; the limit of processor time remains.
    with contextlib.suppress(ValueError, OSError):
        limit = address_space() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in sys.stdin.buffer:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used_seconds = int(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used_seconds + 1 + seconds, hard_limit))
        answer = json.dumps(answer_request(json.loads(line)))
        sys.stdout.buffer.write(answer.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
