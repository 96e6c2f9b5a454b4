"""Compares answers with math-verify. It runs in the sandbox, because a parser may hang or fill the memory, and imports
nothing of this package.

Standard input is {"seconds": ..., "pairs": [[expected, completion], ...]}; each pair becomes a line of output.
"""

import faulthandler
import json
import sys


def main() -> None:
    """Write a line for each pair, after an empty line."""
    from math_verify import parse, verify

    task = json.load(sys.stdin)
    sys.stdout.write("\n")
    for expected, completion in task["pairs"]:
        sys.stdout.flush()
        # math-verify's own time limits are Python signal handlers, which wait for a long operation in C.
        faulthandler.dump_traceback_later(task["seconds"], exit=True)
        is_delimited = "$" in expected or "\\boxed" in expected
        right = parse(expected if is_delimited else f"${expected}$")
        answer = parse(completion)
        outcome = "no_answer"
        if not right:
            outcome = "bad_row"
        elif answer:
            outcome = "right" if verify(right, answer) else "wrong"
        sys.stdout.write(json.dumps([outcome, str(answer[-1]) if answer else ""]) + "\n")


if __name__ == "__main__":
    main()
