"""A client that samples without a pause, and prints a line before and after; its server is killed meanwhile.

Run in its environment: MODEL.
"""

from __future__ import annotations

import sys
import time

import tinker
from tinker import types


def main() -> None:
    service = tinker.ServiceClient()
    trainer = service.create_lora_training_client(base_model=sys.argv[1], rank=4).result()
    state = trainer.save_state("state").result().path
    sampler = trainer.save_weights_and_get_sampling_client().result()

    def ask(place: int) -> tinker.SampleResponse:
        params = types.SamplingParams(max_tokens=40, seed=place, temperature=1.0)
        return sampler.sample(types.ModelInput.from_ints([5, 6]), 8, params).result()

    first = [sequence.tokens for sequence in ask(0).sequences]
    print("sampling", flush=True)
    end = time.monotonic() + float(sys.argv[2])
    place = 0
    while time.monotonic() < end:
        place += 1
        assert len(ask(place).sequences) == 8
    assert [sequence.tokens for sequence in ask(0).sequences] == first
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7], "weights": [1.0, 1.0]}
    )
    again = service.create_training_client_from_state_with_optimizer(state).result()
    loss = again.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]
    print("done", loss, flush=True)


if __name__ == "__main__":
    main()
