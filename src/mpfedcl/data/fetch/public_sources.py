"""Where the public originals of the data sets live, and how to know them when they arrive.

Nothing here was downloaded when it was written: addresses, sizes and checksums are those that
others publish. MNIST, SVHN and DomainNet: the checksum lists of TensorFlow Datasets. USPS and
Caltech-256: the data set sources of torchvision, which give checksums but no sizes. DomainNet's
server was reported unreachable from outside its university for a while in 2024, and Caltech's
sends some visitors on to a file-sharing site; the checksums notice if something else comes.
"""

from dataclasses import dataclass

from mpfedcl.errors import InvalidInput


@dataclass(frozen=True)
class Original:
    """One file as its publisher offers it; None where no size or checksum is public."""

    name: str
    addresses: tuple[str, ...]
    """Mirrors of the same bytes, the best first."""
    size: int | None = None
    sha256: str | None = None
    md5: str | None = None


@dataclass(frozen=True)
class Collection:
    """The originals that belong together, kept in one folder."""

    name: str
    page: str
    """Where a person finds the files."""
    domains: tuple[str, ...]
    """What can be prepared from the files."""
    files: tuple[Original, ...]


@dataclass(frozen=True)
class FetchPlan:
    """What `data fetch NAME` downloads, and the set that is prepared from it."""

    set_name: str
    collections: tuple[Collection, ...]
    by_hand: str = ""
    """The parts without a stable address; {folder} is where to put them."""


MNIST = Collection(
    "mnist",
    "http://yann.lecun.com/exdb/mnist/",
    ("mnist",),
    tuple(
        Original(
            name,
            (
                f"https://storage.googleapis.com/cvdf-datasets/mnist/{name}",
                f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}",
            ),
            size,
            sha256,
        )
        for name, size, sha256 in (
            (
                "train-images-idx3-ubyte.gz",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            (
                "train-labels-idx1-ubyte.gz",
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            (
                "t10k-images-idx3-ubyte.gz",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            (
                "t10k-labels-idx1-ubyte.gz",
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        )
    ),
)

USPS = Collection(
    "usps",
    "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
    ("usps",),
    tuple(
        Original(
            name,
            (f"https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/{name}",),
            sha256=sha256,
            md5=md5,
        )
        for name, sha256, md5 in (
            (
                "usps.bz2",
                "3771e9dd6ba685185f89867b6e249233dd74652389f263963b3b741e994b034f",
                "ec16c51db3855ca6c91edd34d0e9b197",
            ),
            (
                "usps.t.bz2",
                "a9c0164e797d60142a50604917f0baa604f326e9a689698763793fa5d12ffc4e",
                "8ea070ee2aca1ac39742fdd1ef5ed118",
            ),
        )
    ),
)

SVHN = Collection(
    "svhn",
    "http://ufldl.stanford.edu/housenumbers/",
    ("svhn",),
    tuple(
        Original(name, (f"http://ufldl.stanford.edu/housenumbers/{name}",), size, sha256, md5)
        for name, size, sha256, md5 in (
            (
                "train_32x32.mat",
                182_040_794,
                "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                "e26dedcc434d2e4c54c9b2d4a06d8373",
            ),
            (
                "test_32x32.mat",
                64_275_384,
                "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
                "eb5a983be6a315427106f1b164d9cef3",
            ),
        )
    ),
)

_DOMAINNET = "http://csr.bu.edu/ftp/visda/2019/multi-source"

DOMAINNET = Collection(
    "domainnet",
    "http://ai.bu.edu/M3SDA/",
    ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    tuple(
        Original(path.rpartition("/")[2], (f"{_DOMAINNET}/{path}",), size, sha256)
        for path, size, sha256 in (
            (
                "groundtruth/clipart.zip",
                1_270_909_081,
                "f8f248a3e8bbc9868c523ae24e6601b4c2ad102afc60c0efeb4f3255df22354d",
            ),
            (
                "infograph.zip",
                4_338_659_804,
                "891e14f476317e97b6f06d6498c11d0a5b8d0c8b57210765ed9beb072da611fa",
            ),
            (
                "groundtruth/painting.zip",
                3_679_366_174,
                "fa47e6d405503ea0286cabd767f176bd30e988b63ddd7b9db16cf030c9770015",
            ),
            (
                "quickdraw.zip",
                459_920_701,
                "9f37df2a8c3733703dbb35ad9964202a65f675ca30137756457537536b485d84",
            ),
            (
                "real.zip",
                6_062_039_589,
                "d7fe010b430c5b510f85d657d38c4a1924822695fabea4fef57bd00dba251d63",
            ),
            (
                "sketch.zip",
                2_633_992_926,
                "23a7dbae7016b343e934399beaa8a68728fb5e570ebe2c71df9b75cf91c499fc",
            ),
            (
                "domainnet/txt/clipart_train.txt",
                1_443_819,
                "affdadf5f95a7583e6b98030a3d35007e2613ee4dd942393c5a705ec2b429312",
            ),
            (
                "domainnet/txt/clipart_test.txt",
                628_917,
                "62c8e36aaba1c41ad9e249099739707220a44c08f167b37ef420f34a31628a6b",
            ),
            (
                "domainnet/txt/infograph_train.txt",
                1_683_098,
                "36b44cbd41a2915e0dc73b4f4be8862a6f3c220f93c8d63fb2439beeae3aefda",
            ),
            (
                "domainnet/txt/infograph_test.txt",
                728_028,
                "413cfa54ac92e7e6b242f4f09fbd9c8ace85c4deaf3cb6c81ff6b68264460136",
            ),
            (
                "domainnet/txt/painting_train.txt",
                2_241_901,
                "f1da38d50a702fddf1329f85bc607d7a2abcae7e6aec75e1fd49cc1bd340d47b",
            ),
            (
                "domainnet/txt/painting_test.txt",
                971_888,
                "11472b13b5188e09f06918b12eebb660588c97a20e43e268d9b02e3e37eb8f97",
            ),
            (
                "domainnet/txt/quickdraw_train.txt",
                5_164_600,
                "3a5edd3bc215772010eebc87f158707703dd7e48091d13b816af81326a9d1c0f",
            ),
            (
                "domainnet/txt/quickdraw_test.txt",
                2_213_400,
                "2a00a60650a453c65c356da748fec54084a197272137c440e7d52d08947357bf",
            ),
            (
                "domainnet/txt/real_train.txt",
                4_440_944,
                "19d483256d24aef19e581b65eda8333fd918aef3eb733fe499ff384120e3a289",
            ),
            (
                "domainnet/txt/real_test.txt",
                1_911_327,
                "2b3f75bcde309aeb5931292084b2162e936b5f189e3bb1ad716f0f74c460864c",
            ),
            (
                "domainnet/txt/sketch_train.txt",
                1_960_222,
                "72f4bc6afa5702a1ccba800d0053c1427de87439dfaf246dbc9a2e71abfec54f",
            ),
            (
                "domainnet/txt/sketch_test.txt",
                850_581,
                "3fb48fca18c507c4321f007c3f62b308ec232ff6928cbfe2af64e76ec366e840",
            ),
        )
    ),
)

CALTECH = Collection(
    "caltech256",
    "https://data.caltech.edu/records/nyy15-4j048",
    ("caltech",),
    (
        Original(
            "256_ObjectCategories.tar",
            ("https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar",),
            sha256="08ff01b03c65566014ae88eb0490dbe4419fc7ac4de726ee1163e39fd809543e",
            md5="67b4f42ca05d46448c6bb8ecd2220f6d",
        ),
    ),
)

FETCH_PLANS = {
    "mnist": FetchPlan("mnist", (MNIST,)),
    "digit5": FetchPlan(
        "digit5",
        (MNIST, SVHN, USPS),
        "SynthDigits (SynthDigits.zip) and MNIST-M (mnist_m.tar.gz) have no stable address: bring "
        "them by hand from http://yaroslav.ganin.net/, put them into {folder} and run the same "
        "command again.",
    ),
    "svhn": FetchPlan("digit5", (SVHN,)),
    "usps": FetchPlan("digit5", (USPS,)),
    "domainnet": FetchPlan("domainnet", (DOMAINNET,)),
    "office10": FetchPlan(
        "office10",
        (CALTECH,),
        "amazon, dslr and webcam of Office-31 have no stable address: bring them by hand from "
        "https://faculty.cc.gatech.edu/~judy/domainadapt/, unpack them into {folder} and run the "
        "same command again.",
    ),
}
"""By name; svhn and usps are parts of digit5."""


def fetch_plan(name: str) -> FetchPlan:
    """Return what to download for a name."""
    if name not in FETCH_PLANS:
        raise InvalidInput(
            f"{name!r} cannot be fetched; it must be one of {', '.join(FETCH_PLANS)} (data prepare "
            "takes files that you bring)."
        )
    return FETCH_PLANS[name]
