"""Folders as people have them: what is a class, what is a sample, and which sample is which file."""

import csv
import os
import shutil
import tarfile

import numpy as np
import pytest
import torch
from conftest import fails
from PIL import Image
from test_data import jpeg, write_folder

import pptp
from pptp.cli import main
from pptp.folders import by_class, in_archive
from pptp.runs import Run
from pptp.sources import _names_of_classes, load
from pptp.splits import copies_of_members

SIZES = "--model test_resnet --img-size 16 --epochs 2 -b 10 --no-augment --opt adamw --lr 0.003".split()


def source(path, **more):
    return pptp.Source(data=str(path), img_size=8, **more)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("stray", "says"),
    [
        ("a/2019/x.png", "lies deeper than one class folder"),
        ("logo.png", "lies in no class folder"),
    ],
)
def test_images_that_are_in_no_class_are_refused(tmp_path, stray, says, packed):
    """Else the year would be learned instead of the class."""
    write_folder(tmp_path / "set", splits=(".",))
    odd = tmp_path / "set" / stray
    odd.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(odd)
    where = tmp_path / "set"
    if packed:
        where = tmp_path / "set.tar"
        with tarfile.open(where, "w") as tar:
            tar.add(tmp_path / "set", "set")
    with pytest.raises(pptp.UserError, match=f"{stray}.*{says}"):
        load(source(where))


@pytest.mark.parametrize("packed", [False, True])
def test_what_editors_leave_behind_is_no_class_and_no_sample(tmp_path, packed):
    root = tmp_path / "set"
    write_folder(root, splits=(".",))
    shutil.copytree(root / "a", root / "a" / ".ipynb_checkpoints")
    shutil.copytree(root / "a", root / "__MACOSX" / "a")
    (root / "b" / "._x.JPEG").write_bytes(jpeg(1))
    (root / "b" / "notes.txt").write_text("no image")
    where = root
    if packed:
        where = tmp_path / "set.tar"
        with tarfile.open(where, "w") as tar:
            tar.add(root, "set")
    pool, _ = load(source(where))
    assert len(pool) == 12 and pool.class_names == ["a", "b"] and np.bincount(pool.labels).tolist() == [6, 6]
    assert packed or pool.left_out > 7


def test_names_that_natural_order_takes_for_equal_have_an_order_of_their_own():
    """Labels must not depend on how a set happens to be ordered."""
    names = [f"{name}/{i}.png" for name in ("b", "A", "B", "a") for i in ("1", "01")]
    assert list(by_class(names, "here").class_to_idx) == ["A", "a", "B", "b"]


def test_numbers_of_other_scripts_do_not_stop_the_order():
    assert list(by_class([f"{name}/1.png" for name in ("1²", "10", "2", "٣")], "here").class_to_idx) == ["1²", "2", "٣", "10"]


@pytest.mark.parametrize("packed", [False, True])
def test_splits_without_classes_are_not_taken_for_classes(tmp_path, packed):
    where = tmp_path / "set"
    write_folder(where, splits=(".",), classes=("test", "Train"))
    if packed:
        with tarfile.open(tmp_path / "set.tar", "w") as tar:
            tar.add(where, "set")
        where = tmp_path / "set.tar"
    with pytest.raises(pptp.UserError, match="lie in test, Train, without classes.*SPLIT/CLASS/IMAGE"):
        load(source(where))


def test_of_two_names_of_a_split_the_one_that_was_asked_for_is_read(tmp_path):
    write_folder(tmp_path, splits=("train", "val"))
    write_folder(tmp_path, splits=("validation",), classes=("a", "b", "c"))
    assert len(load(source(tmp_path, train_split="validation"))[0].class_names) == 3
    with pytest.raises(pptp.UserError, match="has val, validation for the split 'eval': say which one"):
        load(source(tmp_path, train_split="eval"))


def test_a_picture_that_is_too_large_to_open_is_named(tmp_path, monkeypatch):
    write_folder(tmp_path, splits=(".",))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(pptp.UserError, match="cannot read the image .*exceeds limit"):
        load(source(tmp_path))


def test_hidden_folders_above_a_split_are_left_out_of_archives():
    names = [".cache/train/a/1.png", "train/a/1.png", "train/b/1.png", "test/a/1.png"]
    kept, files, others = in_archive(names, "train", ["train"], "x.tar")
    assert files == ["train/a/1.png", "train/b/1.png"] and kept.positions == [1, 2] and others == ["test"]


@pytest.mark.parametrize(("more", "says"), [([], "not read, since they are other splits: test, val: --val-split test takes"), (["--val-split", "val"], "splits: test\n")])
def test_splits_that_are_not_read_are_named(more, says, tmp_path, capsys):
    for split in ("train", "val", "test"):
        noisy_folder(tmp_path / "set" / split)
    for k, path in enumerate(sorted((tmp_path / "set" / "val").rglob("*.png"))):
        Image.fromarray(np.random.default_rng(1000 + k).integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
    assert main(["train", str(tmp_path / "r"), "--data", str(tmp_path / "set"), *more, *SIZES]) == 0
    assert says in capsys.readouterr().out


def test_a_folder_around_the_data_is_pointed_out(tmp_path):
    write_folder(tmp_path / "wrap" / "set", splits=(".",))
    with pytest.raises(pptp.UserError, match="give .*wrap/set as the data"):
        load(source(tmp_path / "wrap"))


def test_raw_tiny_imagenet_has_no_hidden_class(tmp_path):
    write_folder(tmp_path, splits=("train",), classes=("n01", "n02"), middle=("images",))
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "val_annotations.txt").write_text("")
    assert load(source(tmp_path))[0].class_names == ["n01", "n02"]


@pytest.mark.parametrize(("line", "says"), [("x.JPEG\tn09\t0\t0", "x.JPEG n09 0 0"), ("x.JPEG", "'x.JPEG'")])
def test_raw_tiny_imagenet_with_a_class_left_out_is_refused(tmp_path, line, says):
    write_folder(tmp_path, splits=("train",), classes=("n01", "n02"), middle=("images",))
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "val_annotations.txt").write_text(f"\n{line}\n")
    with pytest.raises(pptp.UserError, match=f"{says}.*names no class of"):
        load(source(tmp_path, val_split="val"))


def test_a_worker_says_no_more_than_the_sentence(tmp_path):
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            raise pptp.UserError("cannot read the image x.png: mend or remove it")

    with pytest.raises(pptp.UserError, match="^cannot read the image x.png: mend or remove it$"):
        list(torch.utils.data.DataLoader(Broken(), num_workers=1))


def test_the_first_of_several_names_of_a_class_is_shown():
    class Synonyms:
        class_to_idx = {"tench": 0, "Tinca tinca": 0, "goldfish": 1}

    assert _names_of_classes(Synonyms(), pptp.Source(data="x")) == ["tench", "goldfish"]


def test_names_that_are_no_utf8_do_not_stop_a_run(tmp_path, capsys):
    data = os.fsencode(noisy_folder(tmp_path / "images"))
    os.rename(data + b"/a", data + b"/caf\xe9")
    assert main(["train", str(tmp_path / "r"), "--data", str(tmp_path / "images"), *SIZES]) == 0
    assert b"caf\xe9/im 0.png" in (tmp_path / "r" / "samples.csv").read_bytes()


def test_a_class_may_be_called_train_and_a_split_may_begin_with_a_capital(tmp_path):
    write_folder(tmp_path / "cars", splits=(".",), classes=("bus", "car", "train"))
    assert load(source(tmp_path / "cars"))[0].class_names == ["bus", "car", "train"]
    write_folder(tmp_path / "capital", splits=("Train", "Test"))
    assert len(load(source(tmp_path / "capital"))[0]) == 12
    with pytest.raises(pptp.UserError, match="not divided into splits, so leave out --train-split"):
        load(source(tmp_path / "cars", train_split="foo"))


def test_other_formats_are_read_and_a_folder_without_images_is_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for ending in ("bmp", "tiff", "webp", "gif"):
            Image.new("RGB", (8, 8), (90, 90, 90)).save(tmp_path / "set" / name / f"x.{ending}")
    assert len(load(source(tmp_path / "set"))[0]) == 8
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(pptp.UserError, match="there is no image in"):
        load(source(tmp_path / "empty"))


def test_sixteen_bits_keep_their_upper_eight(tmp_path):
    """A plain conversion clips them to black and white."""
    ramp = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(ramp).save(tmp_path / name / "deep.png")
    pool, _ = load(source(tmp_path))
    assert torch.equal(pool.pixels[0, 0], torch.from_numpy((ramp >> 8).astype(np.uint8)))
    Image.fromarray(ramp).save(tmp_path / "a" / "deep.pgm")
    assert torch.equal(load(source(tmp_path))[0].pixels[0, 0], pool.pixels[0, 0])
    Image.fromarray(ramp.astype(np.int32)).save(tmp_path / "a" / "deep.tiff")
    with pytest.raises(pptp.UserError, match="deep.tiff holds numbers of 32 bits"):
        load(source(tmp_path))


# --- which sample is which file ----------------------------------------------------------------------


def noisy_folder(root, each=24, classes=("a", "b")):
    rng = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(each):
            pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"im {i}.png")
    return root


def table_of(run):
    with open(run / "samples.csv") as file:
        return list(csv.DictReader(file))


def test_a_run_says_which_file_every_id_stands_for(tmp_path, capsys):
    data, run = noisy_folder(tmp_path / "images"), tmp_path / "r"
    assert main(["train", str(run), "--data", str(data), *SIZES, "--test", "8"]) == 0
    assert "classes: a 24, b 24" in capsys.readouterr().out
    rows, splits = table_of(run), Run.open(run).splits
    assert [row["file"] for row in rows[:3]] == ["a/im 0.png", "a/im 1.png", "a/im 2.png"], "2 before 10"
    assert {int(row["id"]) for row in rows if row["part"] == "h1"} == set(splits.h1.indices)
    assert rows[30]["class"] == "b"


def test_parts_may_be_named_by_file_and_other_orders_are_doubted(tmp_path, capsys):
    """Ids in torchvision's order mean other files: membership would be invented, and every leak look mended."""
    data, first = noisy_folder(tmp_path / "images"), tmp_path / "first"
    train = ["--data", str(data), *SIZES, "--epochs", "25"]
    assert main(["train", str(first), *train]) == 0
    rows = table_of(first)
    parts = ("h1", "h2", "reference", "nonmembers", "test")
    by_file = {part: np.array([row["file"] for row in rows if row["part"] == part]) for part in parts}
    np.savez(tmp_path / "files.npz", **by_file)
    lexical = sorted(row["file"] for row in rows)  # im 10 before im 2
    np.savez(tmp_path / "ids.npz", **{part: [lexical.index(file) for file in files] for part, files in by_file.items()})
    checkpoints = [w for m in ("full", "half") for w in (f"--{m}-checkpoint", str(first / m / "last.safetensors"))]
    taken = ["--data", str(data), "--model", "test_resnet", "--img-size", "16", *checkpoints, "--splits-file"]
    capsys.readouterr()
    assert main(["train", str(tmp_path / "named"), *taken, str(tmp_path / "files.npz")]) == 0
    assert "are these the samples" not in capsys.readouterr().out
    named, before = Run.open(tmp_path / "named").splits, Run.open(first).splits
    assert all(np.array_equal(named.indices[part], before.indices[part]) for part in parts)
    assert main(["train", str(tmp_path / "wrong"), *taken, str(tmp_path / "ids.npz")]) == 0
    assert "are these the samples that it was trained on?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"h1": [-1, 0, 1, 2]}, "h1 names sample -1, but the data has 1797"),
        ({"h1": [0.7, 1.7]}, "h1 is float64 of shape (2,): it must be a list of sample ids"),
        ({"h1": [[0, 1], [2, 3]]}, "h1 is int64 of shape (2, 2)"),
        ({"test": []}, "no sample is left for 'test'"),
        ({"nonmembers": []}, "no sample is left for 'nonmembers'"),
        ({"h2": []}, "h2 has 0 samples of 0 classes"),
        ({"h1": ["a/im 0.png"]}, "h1 names files, but these samples do not come from files"),
        ({"test": [5, 900]}, "must be disjoint"),
    ],
)
def test_bad_splits_files_are_refused_before_any_training(changes, says, tmp_path, capsys):
    ids = np.arange(800)
    parts = {"h1": ids[:200], "h2": ids[200:400], "nonmembers": ids[400:600], "test": ids[600:800]}
    np.savez(tmp_path / "s.npz", **{**parts, **{name: np.array(value) for name, value in changes.items()}})
    shown = fails(capsys, "train", tmp_path / "r", "--model", "test_resnet", "--splits-file", tmp_path / "s.npz")
    assert says in shown and "s.npz" in shown and not (tmp_path / "r" / "full").exists()


def test_a_file_that_is_no_npz_is_refused(tmp_path, capsys):
    np.save(tmp_path / "s.npy", np.arange(4))
    shown = fails(capsys, "train", tmp_path / "r", "--model", "test_resnet", "--splits-file", tmp_path / "s.npy")
    assert "it must be an .npz with sample ids" in shown


@pytest.mark.parametrize("canaries", [[], ["--canaries", "4"]])
def test_copies_of_members_among_the_others_are_counted(tmp_path, canaries, capsys):
    data = noisy_folder(tmp_path / "images", each=12)
    for image in list(data.glob("*/*.png")):
        shutil.copy(image, image.with_name(f"copy of {image.name}"))
    assert main(["train", str(tmp_path / "r"), "--data", str(data), *SIZES, *canaries]) == 0
    count = copies_of_members(Run.open(tmp_path / "r").splits)
    assert count > 0 and f"{count} non-members or test images are copies of members" in capsys.readouterr().out


def test_a_class_without_members_is_named(tmp_path, capsys):
    data = noisy_folder(tmp_path / "images", each=20, classes=("many",))
    (data / "rare").mkdir()
    Image.new("RGB", (8, 8)).save(data / "rare" / "one.png")
    assert "class 'rare' has" in fails(capsys, "train", tmp_path / "r", "--data", data, *SIZES)


def test_a_folder_called_digits_does_not_stand_in_for_the_digits(tmp_path, monkeypatch):
    noisy_folder(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    parts = "--members 40 --reference 0 --nonmembers 40 --test 20".split()
    assert main(["train", "r", "--model", "test_resnet", "--data", "digits", "--epochs", "1", *parts]) == 0
    assert Run.open("r").splits.classes == 10
