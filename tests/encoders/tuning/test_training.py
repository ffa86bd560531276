"""What a tuning trains, saves and refuses: encoders, recipes, the command line, and a run that is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from proxymetric.encoders import build, load_weights, parameter_counts, tuned_parameters
from proxymetric.models.load import load
from proxymetric.runs import recipe
from proxymetric.system.checkpoint import Checkpoint
from terminal import proxymetric, refused
from training_runs import Snapshot, command, run, same_run, state
from vits import ALL, TINY_VIT, pictures, stir, two_blocks

RESNET: dict[str, Any] = {"backbone": "resnet18", "dim": 8, "size": 32, "pretrained": False}


@pytest.fixture(autouse=True)
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)


def trainable(encoder: nn.Module) -> set[str]:
    return {name for name, parameter in encoder.named_parameters() if parameter.requires_grad}


def expected(encoder: Any, tuning: str) -> set[str]:
    """Return the names of the trained parameters, from the description of each tuning."""
    names = {name for name, _ in encoder.named_parameters()}
    parts = tuning.split("+")
    found = {name for name in names if name.startswith(("head.", "tuning."))}
    if "full" in parts:
        found |= names
    if "bitfit" in parts:
        found |= {name for name in names if name.endswith(".bias")}
    return found


@pytest.mark.parametrize("tuning", ALL)
def test_what_is_trained_gets_a_gradient_and_nothing_else_does(tuning: str) -> None:
    encoder = build(**TINY_VIT, tuning=tuning)
    stir(encoder.tuning)
    wanted = expected(encoder, tuning)
    encoder(pictures()).square().sum().backward()
    assert {name for name, p in encoder.named_parameters() if p.grad is not None} == trainable(encoder) == wanted
    assert sum(tuned_parameters(encoder).values()) == parameter_counts(encoder)["trained"]
    assert (len(list(encoder.tuning.parameters())) > 0) == bool({"vpt", "adapter", "lora"} & set(tuning.split("+")))


@pytest.mark.parametrize("tuning", ALL)
def test_the_end_of_a_warm_up_frees_nothing_that_is_frozen(tuning: str) -> None:
    encoder = build(**TINY_VIT, tuning=tuning)
    before, counts = trainable(encoder), tuned_parameters(encoder)
    encoder.set_backbone_trainable(False)
    assert trainable(encoder) == {"head.weight", "head.bias"}
    assert not encoder.features(pictures()).requires_grad
    assert tuned_parameters(encoder) == counts
    encoder.set_backbone_trainable(True)
    assert trainable(encoder) == before
    ids = [id(p) for p in encoder.head_parameters() + encoder.backbone_parameters()]
    assert sorted(ids) == sorted(id(p) for p in encoder.parameters())


def test_a_frozen_backbone_keeps_nothing_for_the_backward_pass() -> None:
    """Autograd keeps no bytes besides the parameters for the linear probe, and few if no weight is trained."""

    def kept(tuning: Any) -> int:
        encoder = build(**TINY_VIT, tuning=tuning)
        known = {p.untyped_storage().data_ptr() for p in encoder.parameters()}
        found: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            features = encoder.features(pictures(8, 32))
        del features
        return sum(found.values())

    full = kept("full")
    assert kept("linear") == 0
    assert 0 < kept("bitfit") < 0.75 * full
    assert 0 < kept({"name": "vpt", "prompts": 1, "depth": 1}) < 0.9 * full


@pytest.mark.parametrize("tuning", [*ALL, {"name": "vpt+bitfit", "prompts": 4, "step": 3, "depth": 2}])
def test_config_and_state_rebuild_the_same_encoder(tuning: Any) -> None:
    encoder = build(**TINY_VIT, tuning=tuning, layer_norm=True, head_init="xavier")
    stir(encoder)
    again = build(**json.loads(json.dumps(encoder.config)))
    again.load_state_dict(encoder.state_dict())
    assert torch.equal(again.eval()(pictures()), encoder.eval()(pictures()))
    assert (again.config, trainable(again)) == (encoder.config, trainable(encoder))
    assert again.fingerprint() == encoder.fingerprint()


def test_an_encoder_of_before_there_were_tunings_loads_as_full() -> None:
    encoder = build(**TINY_VIT)
    old = {key: v for key, v in encoder.config.items() if key not in ("tuning", "head_init", "checkpointing")}
    again = build(**old)
    again.load_state_dict(encoder.state_dict())
    assert again.config["tuning"] == "full"
    assert all(name.startswith(("backbone.", "head.")) or name in ("mean", "std") for name in encoder.state_dict())


def test_weights_keep_timms_names(tmp_path: Path) -> None:
    plain = build(**TINY_VIT)
    save_file({key: v.contiguous() for key, v in plain.backbone.state_dict().items()}, tmp_path / "vit.safetensors")
    for tuning in ALL:
        encoder = build(**TINY_VIT, tuning=tuning)
        assert load_weights(encoder, tmp_path / "vit.safetensors").fits
        if "vpt" not in tuning:  # adapters and low-rank changes begin at zero
            assert torch.equal(encoder.eval().features(pictures()), plain.eval().features(pictures()))


def test_a_seed_gives_every_tuning_the_same_head() -> None:
    heads = []
    for tuning in ALL:
        torch.manual_seed(3)
        heads.append(build(**TINY_VIT, tuning=tuning).head.weight)
    assert all(torch.equal(head, heads[0]) for head in heads)


def test_cached_features_are_told_apart() -> None:
    def key(tuning: Any) -> str:
        torch.manual_seed(0)
        return build(**TINY_VIT, tuning=tuning).fingerprint()

    assert key("full") == key("linear") == key("bitfit"), "the same features, whatever will be trained"
    adapters = [key({"name": "adapter", "scale": scale}) for scale in (1.0, 0.5)]
    assert len({key("full"), key("vpt"), key("lora"), *adapters}) == 5


def test_images_are_normalised_as_the_weights_want_it() -> None:
    encoder = build(**TINY_VIT, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 0.125))
    white = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    assert encoder.normalise(white)[0, :, 0, 0].tolist() == [1.0, 3.0, 8.0]
    again = build(**encoder.config)
    assert torch.equal(again.std, encoder.std)
    assert again.fingerprint() != build(**TINY_VIT).fingerprint()


def test_the_heads_of_vptsp() -> None:
    torch.manual_seed(0)
    head = build(**{**TINY_VIT, "dim": 1000}, layer_norm=True, head_init="xavier").head
    assert isinstance(head[0], nn.LayerNorm)
    bound = (6 / (192 + 1000)) ** 0.5
    assert head[1].weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert head[1].weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)
    assert not head[1].bias.any()


@pytest.mark.parametrize("kind", [True, "mlp"])
@pytest.mark.parametrize("tuning", ["full", "vpt+bitfit", "vpt+adapter", "vpt+lora", "lora", "linear"])
def test_checkpointing_changes_memory_and_no_bit(tuning: str, kind: bool | str) -> None:
    plain = build(**TINY_VIT, tuning=tuning)
    stir(plain.tuning)
    again = build(**{**plain.config, "checkpointing": kind})
    again.load_state_dict(plain.state_dict())
    calls = []
    block = again.backbone.blocks[1]
    (block.attn.proj if kind is True else block.mlp.fc1).register_forward_hook(lambda *_: calls.append(1))
    outputs = [encoder(pictures()) for encoder in (plain, again)]
    assert torch.equal(*outputs)
    assert len(calls) == 1
    for output in outputs:
        output.square().sum().backward()
    assert len(calls) == (1 if tuning == "linear" else 2), "once more in the backward pass"
    for (name, ours), theirs in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_prompts_from_outside_reach_the_encoder(checkpointing: bool) -> None:
    encoder = build(**TINY_VIT, tuning="vpt", checkpointing=checkpointing)
    given = [torch.randn(2, 3, 192, requires_grad=True), None]
    own = encoder(pictures())
    theirs, both = (encoder.features(pictures(), given, shared) for shared in (False, True))
    assert not torch.allclose(encoder.head(theirs), own)
    assert not torch.allclose(theirs, both)
    direction = torch.randn_like(theirs)  # the sum alone is constant after the last norm
    ((theirs + both) * direction).sum().backward()
    assert given[0].grad.abs().sum() > 0
    assert torch.equal(encoder(pictures()), own), "this pass alone"


def test_a_resnet_trains_its_biases_or_its_head() -> None:
    for tuning, wanted in (("linear", set()), ("bitfit", {"bias"})):
        encoder = build(**RESNET, tuning=tuning)
        backbone = {name for name in trainable(encoder) if name.startswith("backbone.")}
        assert {name.rsplit(".")[-1] for name in backbone} == wanted
        statistics = encoder.backbone.bn1.running_mean.clone()
        encoder.train()(pictures())
        assert torch.equal(encoder.backbone.bn1.running_mean, statistics), "what is not trained stands still"
    assert tuned_parameters(build(**RESNET, tuning="bitfit")) == {"head": 512 * 8 + 8, "biases": 4800}
    assert tuned_parameters(build(**RESNET, tuning="bitfit", freeze_bn=True)) == {"head": 512 * 8 + 8}
    free = build(**RESNET).train()
    free(pictures())
    assert free.backbone.bn1.running_mean.any()


@pytest.mark.parametrize("tuning", ["vpt", "adapter+bitfit", "lora"])
@pytest.mark.parametrize("backbone", ["resnet18", "small"])
def test_what_is_no_vit_is_told_what_it_can_do(backbone: str, tuning: str) -> None:
    with pytest.raises(ValueError, match=r"for a (ResNet|SmallConvNet), expected one of full, linear, bitfit"):
        build(**{**RESNET, "backbone": backbone}, tuning=tuning)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tuning": "vtp"}, "tuning: got 'vtp', expected one of full, .*; did you mean 'vpt'"),
        (
            {"tuning": "vpt+full"},
            "expected full alone because it trains every parameter already; vpt, adapter, lora, bitfit can be joined",
        ),
        ({"tuning": "linear+bitfit"}, "expected linear alone because every tuning trains the head; vpt, adapter,"),
        ({"tuning": "vpt+vpt"}, "expected vpt only once"),
        ({"tuning": {"prompts": 3}}, "a table with a name"),
        (
            {"tuning": {"name": "vpt", "promts": 3}},
            "got argument 'promts' for 'vpt', .* did you mean 'prompts'",
        ),
        ({"tuning": {"name": "linear", "rank": 3}}, "got argument 'rank' for 'linear', expected no arguments"),
        ({"tuning": {"name": "vpt", "prompts": 2.5}}, r"tuning\.prompts: got 2.5, expected a whole number"),
        ({"tuning": {"name": "vpt", "prompts": True}}, r"tuning\.prompts: got True"),
        ({"tuning": {"name": "vpt", "prompts": -1}}, r"tuning\.prompts: got -1"),
        ({"tuning": {"name": "vpt", "step": -1}}, r"tuning\.step: got -1"),
        ({"tuning": {"name": "vpt", "depth": 3}}, r"tuning\.depth: got 3, expected 1 to 2"),
        ({"tuning": {"name": "adapter", "blocks": 0}}, r"tuning\.blocks: got 0"),
        ({"tuning": {"name": "adapter", "bottleneck": 0}}, r"tuning\.bottleneck: got 0"),
        ({"tuning": {"name": "adapter", "position": "serial"}}, "got 'serial', expected one of parallel, sequential"),
        ({"tuning": {"name": "adapter", "scale": 0.0}}, r"tuning\.scale: got 0.0"),
        ({"tuning": {"name": "lora", "rank": 0}}, r"tuning\.rank: got 0"),
        ({"tuning": {"name": "lora", "alpha": "x"}}, r"tuning\.alpha: got 'x'"),
        ({"tuning": {"name": "lora", "alpha": -1}}, r"tuning\.alpha: got -1"),
        ({"head_init": "xaver"}, "did you mean 'xavier'"),
        ({"head_init": "xavier", "head": "none", "dim": None}, "head_init: got 'xavier' with head='none'"),
        ({"backbone": "vit_base_patch16_rpn_224", "tuning": "adapter"}, "blocks of type ResPostBlock, expected .*vpt"),
        (
            {"backbone": "vit_small_patch16_18x2_224", "tuning": "lora"},
            "of type ParallelThingsBlock, expected .*vpt",
        ),
        ({"backbone": "vit_small_patch16_dinov3", "tuning": "vpt"}, "for a Eva, expected one of full, linear, bitfit"),
        (
            {"backbone": "vit_small_patch16_dinov3", "checkpointing": True},
            "got True with .*, a Eva, expected False",
        ),
        (
            {"backbone": "vit_base_patch16_rpn_224", "checkpointing": "mlp"},
            "of type ResPostBlock, expected True",
        ),
        ({"checkpointing": "all"}, "checkpointing: got 'all', expected True, False or 'mlp'"),
        ({"mean": (124.0, 116.0, 104.0)}, r"mean: got .*, expected three numbers in \[0, 1\]"),
        ({"std": (0.2, 0.2)}, r"std: got \(0.2, 0.2\), expected three numbers"),
        ({"std": (0.2, 0.0, 0.2)}, r"expected three numbers in \(0, 1\]"),
    ],
)
def test_mistakes_get_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build(**{**TINY_VIT, **options})


def test_prompts_that_do_not_suit_are_refused() -> None:
    encoder = build(**TINY_VIT, tuning="vpt")
    for prompts, sentence in (
        ([torch.zeros(3, 4, 192)], r"prompts\[0\]: got shape \(3, 4, 192\), expected \(2, n, 192\)"),
        ([None, torch.zeros(2, 192)], r"prompts\[1\]"),
        ([None] * 3, "got 3 entries, expected at most 2"),
        (torch.zeros(2, 4, 192), "got a tensor"),
    ):
        with pytest.raises(ValueError, match=sentence):
            encoder.features(pictures(), prompts)
    with pytest.raises(ValueError, match="got prompts for a SmallConvNet, expected a ViT as backbone"):
        build("small", dim=8, size=32).features(pictures(), [])


def test_a_recipe_names_a_tuning() -> None:
    def check(tuning: Any, **train: Any) -> Any:
        return recipe.check({"encoder": {"tuning": tuning}, "train": train}).encoder["tuning"]

    whole = {"name": "vpt+bitfit", "prompts": 10, "depth": None, "step": 0}
    assert check("full") == "full" == recipe.check({}).encoder["tuning"]
    assert check("vpt+bitfit") == check("bitfit+vpt") == check({"name": "vpt+bitfit"}) == whole
    assert check({"name": "vpt+bitfit", "depth": 3}) == whole | {"depth": 3}
    said = recipe.settings(['encoder.tuning={name = "lora", rank = 4}'])["encoder"]["tuning"]
    assert check(said) == {"name": "lora", "rank": 4, "alpha": 8.0, "layers": "qkv"}
    with pytest.raises(ValueError, match="did you mean 'rank'"):
        check({"name": "lora", "rnk": 4})
    with pytest.raises(ValueError, match=r"encoder\.tuning: got 3, expected text or a table"):
        check(3)
    assert check("linear", frozen=True) == "linear"
    for tuning in ("bitfit", "vpt"):
        with pytest.raises(ValueError, match=r"train\.frozen: .*tuning=.*would change them"):
            check(tuning, frozen=True)


VIT_RUN: dict[str, Any] = {
    "encoder__backbone": "vit_tiny_patch16_224",
    "encoder__pretrained": False,
    "encoder__tuning": {"name": "vpt+bitfit", "prompts": 2, "step": 1},
    "train__epochs": 2,
    "train__warmup": 1,
    "train__save_every": 2,
}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes, of which four are trained on, with three steps in an epoch."""
    from conftest import write_photos

    return write_photos(tmp_path_factory.mktemp("few") / "photos", classes=6, images=6)


@pytest.mark.usefixtures("only_training")
def test_a_run_goes_on_bit_for_bit_and_moves_what_is_tuned(few: Path, tmp_path: Path) -> None:
    out, straight = tmp_path / "run", tmp_path / "straight"
    done = run(few, straight, watcher=Snapshot(5, straight, out), **VIT_RUN)
    assert (state(out)["step"], state(straight)["step"]) == (4, 6)
    begun = run(few, tmp_path / "begun", **VIT_RUN | {"train__lr": 0.0, "train__epochs": 1})
    run(few, out, resume=True, **VIT_RUN)
    same_run(out, straight)
    before, after = (Checkpoint.read(folder / "last.safetensors").tensors for folder in (begun.folder, straight))
    moved = {name for name in before if name.startswith("encoder.") and not torch.equal(before[name], after[name])}
    encoder = load(straight).encoder
    assert moved == {f"encoder.{name}" for name in expected(encoder, "vpt+bitfit")}
    assert encoder.config["tuning"] == {"name": "vpt+bitfit", "prompts": 2, "depth": None, "step": 1}
    proxies = 4 * 8
    assert done.result.parameters["trained"] == sum(tuned_parameters(encoder).values()) + proxies


@pytest.mark.usefixtures("only_training")
def test_the_command_line_tunes(few: Path, tmp_path: Path) -> None:
    vit = {key: value for key, value in VIT_RUN.items() if key != "encoder__tuning"} | {"train__epochs": 1}
    answer = proxymetric(*command(few, tmp_path / "run", "--tuning", "adapter+bitfit", **vit))
    assert answer.code == 0, answer
    encoder = load(tmp_path / "run").encoder
    assert tuned_parameters(encoder).keys() == {"head", "adapters", "biases"}
    answer = proxymetric(*command(few, tmp_path / "frozen", "--tuning", "lora", "--frozen", **vit))
    refused(answer, "train.frozen", "lora")
    assert not (tmp_path / "frozen").exists()
