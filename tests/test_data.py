import io
import shutil
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import IterableDataset, TensorDataset

import pptp
from pptp.data import Augmented, Indexed, Part, Pool, crop_and_flip, sample_ids, some
from pptp.sources import digits, load
from pptp.splits import EvaluationDataTouched, _stratified


def made_pool(counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    return Pool(torch.zeros(len(labels), 3, 4, 4, dtype=torch.uint8), labels, (0.5,) * 3, (0.5,) * 3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(8, 60), min_size=2, max_size=6), st.integers(0, 2**31))
def test_parts_are_disjoint_and_stratified(counts, seed):
    pool = made_pool(counts)
    s = pptp.split(pool, 0.5, 0.1, 0.2, 0.2, seed=seed)
    everything = np.concatenate(list(s.indices.values()))
    assert len(np.unique(everything)) == len(everything)
    share = len(s.members) / len(pool)
    for c, n in enumerate(counts):
        assert abs((s.members.labels == c).sum() - share * n) <= 1
        assert abs((s.h1.labels == c).sum() - (s.h2.labels == c).sum()) <= 1


def test_split_depends_on_the_seed_alone():
    pool = made_pool([30, 30])
    assert pptp.split(pool, seed=1).digest() == pptp.split(pool, seed=1).digest() != pptp.split(pool, seed=2).digest()


def test_stratified_gives_exactly_the_sizes_asked_for():
    labels = np.repeat(np.arange(7), [3, 9, 11, 4, 6, 5, 8])
    parts = _stratified(np.arange(len(labels)), labels, [13, 7, 20], np.random.default_rng(0))
    assert [len(p) for p in parts] == [13, 7, 20]


def test_overlapping_parts_are_refused(pool):
    with pytest.raises(pptp.UserError, match="disjoint"):
        pptp.from_indices(pool, h1=range(8), h2=range(8, 16), nonmembers=[15, 16], test=[17, 18])


def test_class_with_one_member_is_refused():
    with pytest.raises(pptp.UserError, match="class 1 has one member"):
        pptp.split(made_pool([40, 2]), 0.5, 0.1, 0.2, 0.2)


def test_more_samples_than_there_are_is_refused():
    with pytest.raises(pptp.UserError, match="there are 20"):
        pptp.split(made_pool([10, 10]), 15, 5, 5, 5)


def test_defense_cannot_read_evaluation_samples(splits):
    data = splits.for_defense()
    assert len(data.members) == 80 and len(data.reference) == 40
    data.members[0], data.reference[0]
    with pytest.raises(EvaluationDataTouched):
        data.nonmembers
    with pytest.raises(EvaluationDataTouched):
        data.members.pool[int(splits.nonmembers.indices[0])]
    with pytest.raises(EvaluationDataTouched):
        data.members.pool[int(splits.test.indices[0])]


def test_validation_split_gives_nonmembers_and_test():
    pool = made_pool([20, 20, 20])
    may_be_member = np.arange(60) % 2 == 0
    s = pptp.split(pool, 0.8, 0.2, 0.5, 0.5, may_be_member=may_be_member)
    assert may_be_member[s.members.indices].all() and may_be_member[s.reference.indices].all()
    assert not may_be_member[s.nonmembers.indices].any() and not may_be_member[s.test.indices].any()


def test_samples_carry_their_pool_index(splits):
    x, y, index = splits.h2[3]
    assert index == splits.h2.indices[3] and y == splits.pool.labels[index]
    assert torch.equal(x, splits.pool[index][0])


def test_augmentation_is_a_function_of_seed_epoch_and_position(splits):
    a, b = Augmented(splits.members, seed=1), Augmented(splits.members, seed=1)
    assert torch.equal(a[3][0], b[3][0])
    b.set_epoch(1)
    assert not torch.equal(a[3][0], b[3][0])


def test_crop_and_flip_shows_shifted_and_mirrored_originals():
    x = torch.arange(64.0).reshape(1, 8, 8) + 1
    seen = {tuple(crop_and_flip(x, np.random.default_rng(i)).flatten().tolist()) for i in range(200)}
    assert len(seen) == 18  # 3 x 3 shifts, flipped or not
    assert tuple(x.flatten().tolist()) in seen and tuple(x.flip(-1).flatten().tolist()) in seen


def test_own_dataset_is_taken_as_it_is():
    own = TensorDataset(torch.randn(6, 3, 4, 4), torch.tensor([0, 1, 0, 1, 0, 1]))
    wrapped = Indexed(own)
    assert wrapped[3][1:] == (1, 3) and list(wrapped.labels) == [0, 1, 0, 1, 0, 1]


def test_stream_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(pptp.UserError, match="stable sample ids"):
        Indexed(Stream())


def test_digits_are_noisy_alike_in_every_part():
    pool = digits(pixel_noise=0.2, label_noise=0.1)
    assert len(pool) == 1797 and pool.pixels.shape[1:] == (3, 32, 32)
    clean = digits(pixel_noise=0.0)
    assert 0.07 < (pool.labels != clean.labels).mean() < 0.13


# --- files -------------------------------------------------------------------------------------------------


def jpeg(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (10, 12), (value, value, value)).save(buffer, "JPEG")
    return buffer.getvalue()


def write_folder(root, splits=("train", "val"), classes=("a", "b"), each=6, middle=()):
    for s, split in enumerate(splits):
        for c, name in enumerate(classes):
            folder = root.joinpath(split, name, *middle)
            folder.mkdir(parents=True)
            for i in range(each):
                (folder / f"{split.strip('.')}_{name}_{i}.JPEG").write_bytes(jpeg(100 * s + 50 * c + i))


def test_folder_is_read_split_by_split(tmp_path):
    write_folder(tmp_path)
    pool, may_be_member = load(pptp.Source(data=str(tmp_path), val_split="val", img_size=8))
    assert len(pool) == 24 and may_be_member.sum() == 12
    assert pool[0][0].shape == (3, 8, 8) and set(pool.labels) == {0, 1}


def test_tar_keeps_its_splits_apart(tmp_path):
    write_folder(tmp_path / "set")
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        tar.add(tmp_path / "set", "set")
    source = pptp.Source(data=str(tmp_path / "set.tar"), img_size=8)
    train, _ = load(source)
    assert len(train) == 12
    assert train.pixels[train.labels == 0].float().mean() < 20  # class a of the training split is the darkest
    both, may_be_member = load(pptp.Source(data=str(tmp_path / "set.tar"), img_size=8, val_split="validation"))
    assert len(both) == 24 and may_be_member.sum() == 12


def test_raw_tiny_imagenet_has_its_classes_not_one_called_images(tmp_path):
    write_folder(tmp_path, splits=("train",), classes=("n01", "n02", "n03"), middle=("images",))
    (tmp_path / "val" / "images").mkdir(parents=True)
    rows = []
    for i, name in enumerate(["n02", "n01", "n03", "n02"]):
        (tmp_path / "val" / "images" / f"val_{i}.JPEG").write_bytes(jpeg(150 + 10 * i))
        rows.append(f"val_{i}.JPEG\t{name}\t0\t0\t9\t9")
    (tmp_path / "val" / "val_annotations.txt").write_text("\n".join(rows))
    pool, may_be_member = load(pptp.Source(data=str(tmp_path), val_split="val", img_size=8))
    assert list(pool.labels[~may_be_member]) == [1, 0, 2, 1] and len(pool) == 22


def test_limits_keep_the_first_classes_and_images(tmp_path):
    write_folder(tmp_path, classes=("a", "b", "c"))
    pool, _ = load(pptp.Source(data=str(tmp_path), img_size=8, limit_classes=2, limit_per_class=4))
    assert np.bincount(pool.labels).tolist() == [4, 4]


def test_large_data_is_decoded_when_read(tmp_path, monkeypatch):
    write_folder(tmp_path)
    in_memory, _ = load(pptp.Source(data=str(tmp_path), img_size=8))
    monkeypatch.setattr("pptp.sources.IN_MEMORY_BYTES", 0)
    lazy, _ = load(pptp.Source(data=str(tmp_path), img_size=8))
    assert not hasattr(lazy, "pixels")
    assert all(torch.equal(in_memory[i][0], lazy[i][0]) and in_memory[i][1:] == lazy[i][1:] for i in range(12))


def test_one_class_is_refused(tmp_path):
    write_folder(tmp_path, classes=("images",))
    with pytest.raises(pptp.UserError, match="one class only"):
        load(pptp.Source(data=str(tmp_path), img_size=8))


def test_splits_with_different_classes_are_refused(tmp_path):
    write_folder(tmp_path, splits=("train",), classes=("a", "b", "c"))
    write_folder(tmp_path, splits=("val",), classes=("a", "b"))
    with pytest.raises(pptp.UserError, match="different classes, first 'c'"):
        load(pptp.Source(data=str(tmp_path), img_size=8, val_split="val"))


@pytest.mark.parametrize(
    "name, says",
    [
        ("digit", "digits"),
        ("no/such/folder", "neither a folder nor a .tar"),
        ("tfds/mnist", "stream"),
        ("torch/cifar100", "--download"),
    ],
)
def test_unknown_data_says_what_to_do(name, says, tmp_path):
    with pytest.raises(pptp.UserError, match=says):
        load(pptp.Source(data=name, data_dir=str(tmp_path) if name.startswith("torch/") else ""))


def test_torchvision_data_is_read_by_name(tmp_path):
    write_folder(tmp_path)
    pool, _ = load(pptp.Source(data="torch/image_folder", data_dir=str(tmp_path), img_size=8))
    assert len(pool) == 12 and set(pool.labels) == {0, 1}


@pytest.mark.parametrize(
    "layout", ["flat folder", "flat tar", "train only", "other classes", "same images", "same name"]
)
def test_validation_split_that_is_not_one_is_refused(tmp_path, layout):
    """Else members would be scored as non-members, and every leak would look mended."""
    root, val = tmp_path / "set", "val"
    if layout in ("flat folder", "flat tar"):
        write_folder(root, splits=(".",))
    elif layout == "other classes":
        write_folder(root, splits=("train",), classes=("a", "b"))
        write_folder(root, splits=("val",), classes=("a", "d"))
    else:
        write_folder(root, splits=("train",))
    if layout == "same images":
        shutil.copytree(root / "train", root / "val")
    if layout == "same name":
        val = "training"
    if layout == "flat tar":
        with tarfile.open(tmp_path / "set.tar", "w") as tar:
            tar.add(root, "set")
        root = tmp_path / "set.tar"
    with pytest.raises(pptp.UserError, match="no folder for the split|different classes|also in|are both"):
        load(pptp.Source(data=str(root), val_split=val, img_size=8))


def test_missing_split_is_not_replaced_by_everything(tmp_path):
    write_folder(tmp_path, splits=("val", "test"))
    with pytest.raises(pptp.UserError, match="no folder for the split 'train': it has test, val"):
        load(pptp.Source(data=str(tmp_path), img_size=8))


def test_labels_are_those_that_the_dataset_returns_not_those_it_lists():
    class Relabelled(torch.utils.data.Dataset):
        targets = [0] * 10

        def __len__(self):
            return 10

        def __getitem__(self, i):
            return torch.zeros(3, 4, 4), 1

    wrapped = Indexed(Relabelled())
    assert wrapped[0][1] == 1 and set(wrapped.labels) == {1}


def test_unreadable_image_is_refused_not_replaced_by_its_neighbour(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "train" / "a" / "train_a_2.JPEG").write_bytes(b"no image")
    with pytest.raises(pptp.UserError, match="cannot read the image .*train_a_2.JPEG"):
        load(pptp.Source(data=str(tmp_path), img_size=8))


def test_unreadable_tar_is_refused(tmp_path):
    (tmp_path / "bad.tar").write_bytes(b"junk")
    with pytest.raises(pptp.UserError, match="cannot read"):
        load(pptp.Source(data=str(tmp_path / "bad.tar"), img_size=8))


@pytest.mark.parametrize("sample, says", [
    (("picture", 0), "is a str"), ((torch.zeros(3, 4, 4, dtype=torch.uint8), 0), "uint8 tensor"), ((torch.zeros(4, 4), 0), "shape"),
    ((torch.zeros(3, 4, 4), "cat"), "a label of your data set is 'cat'"), ({"x": 1}, "is a dict"),
])  # fmt: skip
def test_own_samples_of_the_wrong_kind_are_refused_in_a_sentence(sample, says):
    class Own(torch.utils.data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return sample

    with pytest.raises(pptp.UserError, match=says):
        pptp.split(Own())


@pytest.mark.parametrize("settings, says", [
    ({"img_size": 2}, "img_size is 2"), ({"limit_per_class": -4}, "limit_per_class is -4"), ({"data": "x", "label_noise": 0.2}, "digits only")])  # fmt: skip
def test_bad_source_is_refused(settings, says):
    with pytest.raises(pptp.UserError, match=says):
        pptp.Source(**settings)


def test_more_classes_than_there_are_is_refused():
    with pytest.raises(pptp.UserError, match="limit_classes is 30, but the data has 10"):
        load(pptp.Source(limit_classes=30))


def test_a_part_of_a_part_keeps_the_ids_of_the_pool(pool):
    inner = Part(pool, [10, 20, 30, 40], "inner")
    outer = some(inner, 2, "outer", seed=1)
    assert set(sample_ids(outer)) <= {10, 20, 30, 40}
    assert [outer[k][2] for k in range(2)] == sample_ids(outer).tolist()
