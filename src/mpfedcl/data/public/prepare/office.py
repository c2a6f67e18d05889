"""Office-Caltech: the ten classes that Office-31 and Caltech-256 share, as folders of images."""

import re
from pathlib import Path

from mpfedcl.core.errors import InvalidInput
from mpfedcl.data.image_files import is_image_file, read_image_files
from mpfedcl.data.public.prepare.destination import ImageFolders
from mpfedcl.data.public.prepare.originals_folder import OriginalsFolder, list_folders

CLASSES = {
    "backpack": ("back_pack",),
    # Of Caltech's two bicycles the touring bike is the one in Office-Caltech.
    "bike": ("touring_bike",),
    "calculator": (),
    "headphones": ("headphone", "head_phones"),
    "keyboard": ("computer_keyboard",),
    "laptop_computer": ("laptop",),
    "monitor": ("computer_monitor",),
    "mouse": ("computer_mouse",),
    "mug": ("coffee_mug",),
    "projector": ("video_projector",),
}
"""The classes, and what else their folders are called."""

DOMAIN_FOLDERS = {
    "amazon": ("amazon",),
    "caltech": ("caltech", "caltech10", "caltech256", "caltech-256", "256_objectcategories"),
    "dslr": ("dslr",),
    "webcam": ("webcam",),
}
CALTECH_ARCHIVE = "256_ObjectCategories.tar"

_NUMBER = re.compile(r"^\d+\.")
_CALTECH_101 = re.compile(r"_101$")


def read_office_domain(source: OriginalsFolder, domain: str) -> ImageFolders | None:
    """Find the images of a domain; None without its folder."""
    folder = _find_domain(source, domain)
    if folder is None:
        return None
    classes: dict[str, list[Path]] = {}
    for inner in list_folders(folder):
        name = name_class(inner.name)
        if name is None:
            continue
        if name in classes:
            raise InvalidInput(
                f"{folder} has more than one folder for {name}, {inner.name} among them; it must "
                "have one."
            )
        classes[name] = sorted(path for path in inner.iterdir() if is_image_file(path))
    lacking = [name for name in CLASSES if not classes.get(name)]
    if lacking:
        raise InvalidInput(
            f"{folder} has no images of {', '.join(lacking)}; it must have some of each "
            "of the ten classes."
        )
    # Decoded once and thrown away: a broken file should be named now, not by the first run.
    read_image_files([path for paths in classes.values() for path in paths], image_size=8)
    return ImageFolders(domain, {name: classes[name] for name in CLASSES})


def name_class(folder: str) -> str | None:
    """Return the class of a folder such as back_pack, 003.backpack or 127.laptop-101."""
    plain = _NUMBER.sub("", folder.lower()).replace("-", "_").replace(" ", "_")
    plain = _CALTECH_101.sub("", plain)
    for name, others in CLASSES.items():
        if plain == name or plain in others:
            return name
    return None


def _find_domain(source: OriginalsFolder, domain: str) -> Path | None:
    names = DOMAIN_FOLDERS[domain]
    folder = source.find_folder(names, _holds_classes)
    if folder is None and domain == "caltech":
        archive = source.find_file(CALTECH_ARCHIVE)
        if archive is not None:
            content = source.unpack_archive(
                archive, lambda path: name_class(path.parent.name) is not None
            )
            folder = content.find_folder(names, _holds_classes)
            if folder is None:
                raise InvalidInput(f"{archive} must hold class folders such as 003.backpack.")
    return None if folder is None else _class_folders_of(folder)


def _class_folders_of(folder: Path) -> Path:
    """Return the folder with the class folders; Office-31 has amazon/images/back_pack."""
    return folder / "images" if (folder / "images").is_dir() else folder


def _holds_classes(folder: Path) -> bool:
    return any(
        name_class(inner.name) is not None for inner in list_folders(_class_folders_of(folder))
    )
