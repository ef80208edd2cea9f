import pickle

import pytest
import timm
import torch

import pptp
from pptp.models import atomically, load_weights, read_weights, weights_digest, write_weights


def test_unknown_name_gets_the_nearest_ones():
    with pytest.raises(pptp.UserError, match="did you mean .*resnet18"):
        pptp.create("resnet_18", 10)


def test_initial_weights_are_a_function_of_the_seed():
    a, b, c = (weights_digest(pptp.create("test_resnet", 4, 32, seed=s)) for s in (1, 1, 2))
    assert a == b != c


def test_building_a_model_leaves_the_global_random_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    pptp.create("test_resnet", 4, 32, seed=1)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "swin_tiny_patch4_window7_224"])
def test_any_image_size_works_also_for_fixed_size_families(name):
    model = pptp.create(name, 3, 64).eval()
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 3)


def test_unknown_option_is_refused():
    with pytest.raises(pptp.UserError, match="colour"):
        pptp.create("test_resnet", 3, 32, colour="red")


def test_weights_survive_a_round_trip(tmp_path, model):
    write_weights(model, tmp_path / "w.safetensors")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        assert weights_digest(read_weights(tmp_path / name)) == weights_digest(model)


def test_pickle_that_runs_code_is_refused(tmp_path):
    torch.save(timm.create_model("test_resnet"), tmp_path / "model.pt")
    with pytest.raises(pptp.UserError, match="run code"):
        read_weights(tmp_path / "model.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(print))
    with pytest.raises(pptp.UserError):
        read_weights(tmp_path / "plain.pt")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_truncated_file_is_refused(tmp_path, model, suffix):
    path = tmp_path / f"w{suffix}"
    write_weights(model, path) if suffix == ".safetensors" else torch.save(model.state_dict(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(pptp.UserError, match="damaged"):
        read_weights(path)


def test_other_class_count_is_refused_by_name(model):
    other = pptp.create("test_resnet", classes=7, img_size=32)
    with pytest.raises(pptp.UserError, match="class count differs at fc.weight"):
        load_weights(model, other.state_dict(), "other")


def test_other_architecture_is_refused(model):
    with pytest.raises(pptp.UserError, match="does not fit"):
        load_weights(model, pptp.create("test_vit", 4, 32).state_dict(), "other")


def test_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        atomically(target, fail)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_digest_sees_a_single_bit(model):
    before = weights_digest(model)
    with torch.no_grad():
        model.bn1.running_mean[0] += 1e-7
    assert weights_digest(model) != before
