"""A client that trains two adapters at once, samples, saves, loads, and uses every loss. Run in its environment."""

from __future__ import annotations

import json
import sys

import tinker
import torch
from tinker import types

SEQUENCE = [3, 9, 27, 81, 12, 5, 7, 8, 19]


def datum(row: list[int], **inputs: list[float]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:], **inputs}
    )


def sft(row: list[int]) -> types.Datum:
    return datum(row, weights=[1.0] * (len(row) - 1))


def sampled(client: tinker.SamplingClient, first: int) -> list[list[int]]:
    answer = client.sample(
        prompt=types.ModelInput.from_ints([first]),
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=8, temperature=0),
    ).result()
    return [sequence.tokens for sequence in answer.sequences]


def main() -> None:
    service = tinker.ServiceClient()
    result = {"base": tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name}
    clients = [service.create_lora_training_client(base_model="tiny", rank=rank, seed=rank).result() for rank in (4, 8)]
    rows = [SEQUENCE, SEQUENCE[::-1]]
    adam = types.AdamParams(learning_rate=1e-2)
    losses = []
    for _ in range(40):
        futures = []
        for client, row in zip(clients, rows, strict=True):
            futures.append(client.forward_backward([sft(row)], "cross_entropy"))
            client.optim_step(adam)
        losses.append([future.result().metrics["loss:sum"] for future in futures])
    result["losses"] = [losses[0], losses[-1]]
    samplers = [client.save_weights_and_get_sampling_client().result() for client in clients]
    result["sampled"] = [sampled(sampler, row[0]) for sampler, row in zip(samplers, rows, strict=True)]
    logprobs = samplers[0].compute_logprobs(types.ModelInput.from_ints(SEQUENCE)).result()
    forward = clients[0].forward([sft(SEQUENCE)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    result["logprobs"] = [logprobs[0], max(abs(x - y) for x, y in zip(logprobs[1:], forward, strict=True))]
    base = sampled(service.create_sampling_client(base_model="tiny").result(), SEQUENCE[0])
    result["base_sampled"] = base

    state = clients[0].save_state("first").result().path
    named = clients[0].save_weights_for_sampler("named").result().path
    result["paths"] = [state, named]
    again = service.create_training_client_from_state_with_optimizer(state).result()
    result["loaded"] = sampled(again.save_weights_and_get_sampling_client().result(), SEQUENCE[0])
    result["named"] = sampled(service.create_sampling_client(model_path=named).result(), SEQUENCE[0])
    info = again.get_info()
    result["info"] = [info.model_data.model_name, info.lora_rank]

    numbers = [0.5] * (len(SEQUENCE) - 1)
    policy = {"logprobs": [x - 0.1 for x in forward], "advantages": numbers}
    of_losses = {}
    for loss, inputs in (
        ("importance_sampling", policy),
        ("ppo", policy),
        ("cispo", policy),
        ("dro", policy),
        ("gspo", {**policy, "sequence_ratio_mask": [1.0] * len(numbers)}),
    ):
        output = again.forward_backward([datum(SEQUENCE, **inputs)], loss).result()
        of_losses[loss] = output.metrics["loss:sum"]
    result["of_losses"] = of_losses
    try:
        again.forward_backward([datum(SEQUENCE, **policy)], "stable_reinforce").result()
    except tinker.RequestFailedError as error:
        result["refused"] = str(error)
    try:
        again.optim_step(adam).result()
    except tinker.RequestFailedError as error:
        result["left_out"] = str(error)

    def squares(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = logprobs[0].square().sum()
        return loss, {"squares": float(loss.detach())}

    custom = again.forward_backward_custom([sft(SEQUENCE)], squares).result()
    again.optim_step(adam).result()
    result["custom"] = [custom.metrics["squares"], sum(x * x for x in forward)]
    many = again.forward([sft(SEQUENCE)] * 2100, "cross_entropy").result()  # three chunks, sent in parallel
    result["many"] = len(many.loss_fn_outputs)

    rest = tinker.RestClient()
    result["runs"] = len(rest.list_training_runs().result().training_runs)
    checkpoints = rest.list_checkpoints(state.split("/")[2]).result().checkpoints
    result["checkpoints"] = sorted(checkpoint.checkpoint_id for checkpoint in checkpoints)
    rest.delete_checkpoint_from_tinker_path(named).result()
    result["after"] = len(rest.list_checkpoints(state.split("/")[2]).result().checkpoints)
    merged = clients[0].save_weights_external("merged").result().path
    files = rest.get_external_weights_urls(merged).result().urls
    result["files"] = files
    service.close("success").result()
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
