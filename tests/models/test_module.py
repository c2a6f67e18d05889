"""A user's module as a model: its tensors, embedding, modes and fingerprint."""

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpfedcl.core.errors import InvalidInput
from mpfedcl.core.rng import generator
from mpfedcl.models import ModuleModel
from own_models import HeadFirst, Plain, WithNorm, returns, with_dropout

DOUBLE = torch.float64


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def model_of(factory: Any, shape: tuple[int, ...] = (7,), **settings: Any) -> ModuleModel:
    is_image = len(shape) > 1
    return ModuleModel("mine", factory, shape, 3, is_image=is_image, dtype=DOUBLE, **settings)


def start(model: ModuleModel) -> dict[str, Tensor]:
    return model.init(generator(0), DOUBLE)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(1, "inputs"), dtype=DOUBLE)


def test_outputs_are_those_of_the_module_and_of_its_embedding() -> None:
    model = model_of(HeadFirst)
    inputs, module = draw(9, 7), model.as_module(start(model))
    embeddings, logits = model.apply(start(model), inputs)
    assert torch.equal(logits, module(inputs))
    assert torch.equal(embeddings, module.get_submodule("embed")(inputs).tanh())
    assert model.embedding_size == 5
    assert model.classifier == {"classify.weight", "classify.bias"}


def test_embedding_is_the_output_of_the_named_submodule() -> None:
    model = model_of(HeadFirst, embedding="embed")
    inputs, module = draw(9, 7), model.as_module(start(model))
    assert torch.equal(model.apply(start(model), inputs)[0], module.get_submodule("embed")(inputs))


def test_images_arrive_with_their_channels_first() -> None:
    gray, color = model_of(WithNorm, (6, 8)), model_of(WithNorm, (6, 8, 3))
    assert start(gray)["conv.weight"].shape == (4, 1, 3, 3)
    assert start(color)["conv.weight"].shape == (4, 3, 3, 3)
    images = draw(5, 6, 8, 3)
    module = color.as_module(start(color))
    _, logits = color.apply(start(color), images.flatten(1))
    assert torch.equal(logits, module(images.permute(0, 3, 1, 2)))


def test_token_ids_arrive_as_integers() -> None:
    class Mean(nn.Module):
        def __init__(self, num_classes: int) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 4)
            self.head = nn.Linear(4, num_classes)

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.head(self.table(tokens).mean(1))
            return logits

    model = model_of(Mean, (7,), takes_integers=True)
    tokens = torch.randint(20, (5, 7), generator=generator(2))
    module = model.as_module(start(model))
    assert torch.equal(model.apply(start(model), tokens)[1], module(tokens))


def test_initial_tensors_depend_on_the_seed_only() -> None:
    torch.manual_seed(3)
    first = start(model_of(HeadFirst, seed=1))
    before = torch.random.get_rng_state()
    again, other = start(model_of(HeadFirst, seed=1)), start(model_of(HeadFirst, seed=2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_running_statistics_are_buffers_and_integers_are_not() -> None:
    model = model_of(WithNorm, (6, 6))
    assert model.buffers == {"norm.running_mean", "norm.running_var"}
    assert "norm.num_batches_tracked" not in start(model)
    assert model.normalization >= {"norm.weight", "norm.bias", *model.buffers}
    assert model.difference == "the model has running statistics"
    assert model_of(HeadFirst).difference is None


def test_evaluation_depends_on_no_other_sample_and_changes_nothing() -> None:
    model = model_of(with_dropout, (6, 6))
    params, images = start(model), draw(300, 36)
    kept = {name: value.clone() for name, value in params.items()}
    together = model.apply(params, images)[1]
    alone = torch.cat([model.apply(params, one)[1] for one in images.chunk(300)])
    assert_close(together, alone)
    assert all(torch.equal(params[name], kept[name]) for name in kept)


def test_training_updates_the_given_statistics_as_torch_does() -> None:
    model = model_of(WithNorm, (6, 6))
    tensors, images = start(model), draw(8, 36)
    buffers = {name: tensors[name].clone() for name in model.buffers}
    params = {n: v.requires_grad_() for n, v in tensors.items() if n not in buffers}
    apply = model.apply_in_training(tensors, buffers)
    module = model.as_module(tensors).train()
    assert_close(apply(params, images)[1], module(images.reshape(8, 1, 6, 6)))
    for name, value in module.named_buffers():
        if name in buffers:
            assert_close(buffers[name], value)
    moved = {name: value.clone() for name, value in buffers.items()}
    # A received model is only evaluated.
    received = {name: value.detach() for name, value in params.items()}
    assert torch.equal(apply(received, images)[1], model.apply(tensors, images)[1])
    assert all(torch.equal(buffers[name], moved[name]) for name in moved)


def test_dropout_and_other_modes_are_noticed() -> None:
    class ByMode(Plain):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * (2 if self.training else 1)

    class Drops(Plain):
        def forward(self, images: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(images), 0.5, self.training)

    assert model_of(Drops, (6, 6)).difference == "the model draws random numbers while it trains"
    assert model_of(ByMode, (6, 6)).difference == "the model trains and evaluates differently"


def test_frozen_parameters_are_constants() -> None:
    def frozen(num_classes: int) -> nn.Module:
        module = HeadFirst(num_classes)
        module.embed.requires_grad_(False)
        return module

    model = model_of(frozen, seed=4)
    assert start(model).keys() == {"classify.weight", "classify.bias"}
    inputs, module = draw(4, 7), model.as_module(start(model))
    assert torch.equal(model.apply(start(model), inputs)[1], module(inputs))
    # Other constants are another model.
    assert model.fingerprint == model_of(frozen, seed=4).fingerprint
    assert model.fingerprint != model_of(frozen, seed=5).fingerprint


def test_patterns_choose_the_trained_parameters_instead_of_the_factory() -> None:
    def frozen(num_classes: int) -> nn.Module:
        return HeadFirst(num_classes).requires_grad_(False)

    model = model_of(frozen, train=("embed.*", "*.bias"))
    assert start(model).keys() == {"classify.bias", "embed.weight", "embed.bias"}
    with pytest.raises(InvalidInput, match=r"model.train is 'tower.\*', which matches no "):
        model_of(HeadFirst, train=("embed.*", "tower.*"))


def test_constant_running_statistics_normalize_in_training_and_stay() -> None:
    model = model_of(WithNorm, (6, 6), train=("hidden.*", "head.*"))
    assert model.buffers == frozenset()
    assert model.difference is None
    tensors, images = start(model), draw(8, 36)
    params = {name: value.requires_grad_() for name, value in tensors.items()}
    trained = model.apply_in_training(tensors, {})(params, images)[1]
    assert torch.equal(trained, model.apply(tensors, images)[1])
    assert torch.equal(model.as_module({}).get_buffer("norm.running_mean"), torch.zeros(4).double())


def test_constant_buffers_that_training_changes_are_restored() -> None:
    class Counts(HeadFirst):
        def __init__(self, num_classes: int) -> None:
            super().__init__(num_classes)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, inputs: Tensor) -> Tensor:
            self.get_buffer("seen").add_(len(inputs) if self.training else 0)
            return super().forward(inputs)

    model = model_of(Counts, train=("classify.*",))
    params = {name: value.requires_grad_() for name, value in start(model).items()}
    model.apply_in_training(start(model), {})(params, draw(4, 7))
    assert torch.equal(model.as_module({}).get_buffer("seen"), torch.zeros(1).double())


def test_fingerprint_changes_with_layers_and_code_but_not_with_classes() -> None:
    class Other(HeadFirst):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(2 * inputs)

    known = model_of(HeadFirst).fingerprint
    fewer = ModuleModel("mine", HeadFirst, (7,), 2, is_image=False, dtype=DOUBLE)
    assert fewer.fingerprint == known
    assert model_of(HeadFirst, seed=9).fingerprint == known
    assert model_of(Other).fingerprint != known
    assert model_of(WithNorm, (6, 6)).fingerprint != model_of(with_dropout, (6, 6)).fingerprint


def test_module_has_the_tensors_and_is_independent() -> None:
    model = model_of(WithNorm, (6, 6))
    params = {name: value + 1 for name, value in start(model).items()}
    module = model.as_module(params)
    assert not module.training
    state = module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in params.items())
    module.get_parameter("head.bias").data.zero_()
    assert torch.equal(params["head.bias"], start(model)["head.bias"] + 1)


def fails(num_classes: int) -> nn.Module:
    raise RuntimeError("no weights\nin the file")


class OnlyInTraining(nn.Module):
    """Returns more than logits while it trains, as some vision models do."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(7, num_classes)

    def forward(self, inputs: Tensor) -> Any:
        logits = self.head(inputs)
        return (logits, logits) if self.training else logits


def only_in_training(num_classes: int) -> nn.Module:
    return OnlyInTraining(num_classes)


def no_linear(num_classes: int) -> nn.Module:
    return nn.Conv1d(7, num_classes, 1)


def nothing_to_train(num_classes: int) -> nn.Module:
    return HeadFirst(num_classes).requires_grad_(False)


@pytest.mark.parametrize(
    ("factory", "settings", "message"),
    [
        (
            fails,
            {},
            "'mine', which fails (RuntimeError: no weights at /",
        ),
        (lambda: 3, {}, "'mine', which returns a int; it must return a torch.nn.Module."),
        (nothing_to_train, {}, "has no parameters to train; at least one must require gradients."),
        (returns(torch.zeros(2, 4)), {}, "returns a tensor [2, 4] for 2 samples; it must return l"),
        (returns(None), {}, "returns nothing for 2 samples; it must return logits [2, 3], one for"),
        (only_in_training, {}, "returns a tuple for 2 samples; it must return logits [2, 3]"),
        (returns((1, 2)), {}, "returns a tuple for 2 samples; it must return logits [2, 3]"),
        (
            WithNorm,
            {},
            "fails (ValueError: not enough values to unpack (expected 3, got 1) at /",
        ),
        (lambda num_classes: nn.Linear(4, num_classes), {}, "fails on samples [2, 7] of torch.flo"),
        (lambda: nn.ReLU(), {}, "has no parameters to train"),
        (HeadFirst, {"embedding": "body"}, "model.embedding is 'body'; it must name a submodule o"),
    ],
)
def test_unfit_modules_are_rejected_in_one_line(
    factory: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)) as caught:
        model_of(factory, **settings)
    assert "\n" not in str(caught.value)


def test_errors_of_own_code_name_its_file_and_line() -> None:
    number = inspect.getsourcelines(fails)[1] + 1
    place = re.escape(f"{__file__}:{number}")
    with pytest.raises(InvalidInput, match=rf"no weights at {place}\); it must return a torch"):
        model_of(fails)


def test_errors_of_torch_name_the_line_of_the_module_that_called_it() -> None:
    class Misfit(nn.Module):
        def __init__(self, num_classes: int) -> None:
            super().__init__()
            self.layer = nn.Linear(3, num_classes)

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.layer(inputs)
            return logits

    number = inspect.getsourcelines(Misfit.forward)[1] + 1
    with pytest.raises(InvalidInput, match=rf"RuntimeError: mat1 .* at {__file__}:{number}\)"):
        model_of(Misfit)


def test_modules_without_linear_layers_need_a_named_embedding() -> None:
    class Convolves(nn.Module):
        def __init__(self, num_classes: int) -> None:
            super().__init__()
            self.features = nn.Conv1d(1, 4, 3)
            self.classes = nn.Conv1d(4, num_classes, 5)

        def forward(self, inputs: Tensor) -> Tensor:
            logits: Tensor = self.classes(self.features(inputs.unsqueeze(1))).flatten(1)
            return logits

    with pytest.raises(InvalidInput, match=r"calls no torch\.nn\.Linear; model\.embedding must"):
        model_of(Convolves)
    assert model_of(Convolves, embedding="features").embedding_size == 4 * 5
