"""Pictures of other servers, fetched from a TLS server here: from whom, how long, how large, and from whom never."""

import contextlib
import datetime
import http.server
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from PIL import Image

from kvserve.core import ImageBlock, Message, TextBlock
from kvserve.errors import BadRequest
from kvserve.prompt.images import Images
from kvserve.prompt.images_remote import RemoteLimits, RemotePictures, Visit, is_public
from tests.prompt.test_images import WORDS, MeasuresImage, turn, user
from tests.prompt.test_images_source import RED, encoded

HOST = "pictures.test"
PICTURE = encoded(RED)
ONE_MIB = 2**20
LIMITS = RemoteLimits()

type Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


def certificate(folder: Path, host: str = HOST) -> tuple[Path, Path]:
    """A certificate for a host that vouches for itself, and its key: two PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    today = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=2))
        .not_valid_after(today + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / f"{host}.pem", folder / f"{host}.key"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files[1].write_bytes(key.private_bytes(*form))
    return files


class Host:
    """An HTTPS server on this machine; `answers` says what stands at a path, `asked` which paths were asked for."""

    def __init__(self, port: int, trusted: Path) -> None:
        self.port = port
        self.answers: dict[str, Answer] = {"/red.png": sends(PICTURE)}
        self.asked: list[str] = []
        self._trusted = trusted

    def url(self, path: str = "/red.png") -> str:
        return f"https://{HOST}:{self.port}{path}"

    def pictures(self, limits: RemoteLimits = LIMITS, **how: Any) -> RemotePictures:
        """What fetches from it: the name leads to this machine, which counts as public."""
        how = {"resolve": lambda host, port: ["127.0.0.1"], "may_ask": lambda address: True, **how}
        tls = ssl.create_default_context(cafile=str(self._trusted))
        return RemotePictures([f"{HOST}:{self.port}"], limits, tls=tls, **how)

    def visit(self, **how: Any) -> Visit:
        return self.pictures(**how).visit()


def sends(content: bytes, *headers: tuple[str, str], status: int = 200) -> Answer:
    """An answer of these bytes."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in (("Content-Length", str(len(content))), *headers):
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def host(files: tuple[Path, Path]) -> Iterator[Host]:
    with running_host(files) as host:
        yield host


@contextlib.contextmanager
def running_host(files: tuple[Path, Path]) -> Iterator[Host]:
    """A server that ends with its block; a client that left it is no failure."""
    held: list[Host] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            held[0].asked.append(self.path)
            self.close_connection = True
            with contextlib.suppress(OSError):
                held[0].answers[self.path](self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

        def finish_request(self, request: Any, client_address: Any) -> None:
            request.settimeout(20)
            with contextlib.suppress(OSError), context.wrap_socket(request, server_side=True) as secured:
                super().finish_request(secured, client_address)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    with Server(("127.0.0.1", 0), Handler) as server:
        held.append(Host(server.server_port, files[0]))
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield held[0]
        finally:
            server.shutdown()
            thread.join()


def test_a_picture_of_an_allowed_host_is_read(host: Host) -> None:
    """Its bytes as they are, its query as it stands, an address twice in a request once."""
    host.answers["/a%20b.png?size=1&x=%C3%A4"] = sends(PICTURE)
    visit = host.visit()
    assert visit.read(host.url("/a b.png?size=1&x=%C3%A4"), ONE_MIB) == PICTURE
    assert visit.read(host.url(), ONE_MIB) == visit.read(host.url(), ONE_MIB) == PICTURE
    assert host.asked == ["/a%20b.png?size=1&x=%C3%A4", "/red.png"]


def refusal(visit: Visit, url: str, max_bytes: int = ONE_MIB) -> str:
    with pytest.raises(BadRequest) as refused:
        visit.read(url, max_bytes)
    assert refused.value.param == "messages"
    assert len(refused.value.message) < 400
    return refused.value.message


@pytest.mark.parametrize(
    "url",
    [
        "https://elsewhere.test/a.png",
        f"https://{HOST}/a.png",
        f"https://{HOST}.evil.test/a.png",
        "https://127.0.0.1/a.png",
        "https://[::1]/a.png",
        f"http://{HOST}:PORT/a.png",
        f"https://user@{HOST}:PORT/a.png",
        f"https://{HOST}:PORT@elsewhere.test/a.png",
        f"https://{HOST}:99999/a.png",
        "https:///a.png",
    ],
)
def test_what_is_not_allowed_by_name_is_not_even_resolved(host: Host, url: str) -> None:
    """Another host, port or scheme, an address in numbers, a user's name."""
    resolved: list[str] = []

    def resolve(name: str, port: int) -> Sequence[str]:
        resolved.append(name)
        return ["127.0.0.1"]

    assert "remote image cannot be read" in refusal(host.visit(resolve=resolve), url.replace("PORT", str(host.port)))
    assert resolved == [] and host.asked == []


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["10.0.0.7"], ["93.184.216.34", "192.168.1.1"], ["::1"]])
def test_a_name_that_leads_inside_is_refused(host: Host, addresses: list[str]) -> None:
    """One private address among a host's is enough, and nobody is asked."""
    visit = host.visit(resolve=lambda name, port: addresses, may_ask=is_public)
    assert "not on the public internet" in refusal(visit, host.url())
    assert host.asked == []


def test_a_name_is_resolved_once(host: Host) -> None:
    """A second look could be answered otherwise: the connection goes to the address that was judged."""
    answers = iter([["127.0.0.1"]])
    assert host.visit(resolve=lambda name, port: next(answers)).read(host.url(), ONE_MIB) == PICTURE


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("64:ff9b::5db8:d822", True),
        ("::ffff:93.184.216.34", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::7f00:1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:7f00:1::1", False),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
        ("2001:db8::1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("fd12::1", False),
        ("ff02::1", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    """Loopback, private, link-local, shared, unique local, group, reserved, tunnels: none is public."""
    assert is_public(address) is expected


def test_another_hosts_certificate_is_refused(host: Host, tmp_path: Path) -> None:
    """One that nobody vouches for, and one of another name."""
    stranger = host.pictures()
    stranger._tls = ssl.create_default_context()
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(stranger.visit(), host.url())
    with running_host(certificate(tmp_path, "other.test")) as other:
        assert "CERTIFICATE_VERIFY_FAILED" in refusal(other.visit(), other.url())
        assert other.asked == []


def test_a_redirect_is_asked_the_same_questions(host: Host) -> None:
    """It may lead to where the address itself could have led, a few times; nowhere else."""
    host.answers |= {
        "/moved": sends(b"", ("Location", "/red.png"), status=302),
        "/out": sends(b"", ("Location", "https://elsewhere.test/red.png"), status=301),
        "/down": sends(b"", ("Location", f"http://{HOST}:{host.port}/red.png"), status=307),
        "/file": sends(b"", ("Location", "file:///etc/passwd"), status=302),
        "/round": sends(b"", ("Location", "/round"), status=308),
    }
    assert host.visit().read(host.url("/moved"), ONE_MIB) == PICTURE
    assert "is not one of IMAGE_HOSTS" in refusal(host.visit(), host.url("/out"))
    assert "only https" in refusal(host.visit(), host.url("/down"))
    assert "only https" in refusal(host.visit(), host.url("/file"))
    assert "redirects more than" in refusal(host.visit(), host.url("/round"))


def test_what_a_host_cannot_give(host: Host) -> None:
    """Another status, a compressed file, one that breaks off, no host at all."""

    def short(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"abc")

    host.answers |= {
        "/gone": sends(b"no", status=404),
        "/zipped": sends(b"x", ("Content-Encoding", "gzip")),
        "/short": short,
        "/noise": lambda handler: handler.wfile.write(b"\0\1\2\r\n\r\n") and None,
    }
    assert "answered 404" in refusal(host.visit(), host.url("/gone"))
    assert "compressed" in refusal(host.visit(), host.url("/zipped"))
    assert "broke off" in refusal(host.visit(), host.url("/short"))
    assert "cannot be fetched" in refusal(host.visit(), host.url("/noise"))

    def unknown(name: str, port: int) -> Sequence[str]:
        raise OSError("Name or service not known")

    assert "Name or service not known" in refusal(host.visit(resolve=unknown), host.url())
    assert "no address" in refusal(host.visit(resolve=lambda name, port: []), host.url())


@pytest.mark.parametrize("says_how_long", [True, False])
def test_a_file_that_is_too_large_is_not_read_to_its_end(host: Host, says_how_long: bool) -> None:
    """Whether its host says how long it is or goes on and on."""
    sent = 0

    def flood(handler: http.server.BaseHTTPRequestHandler) -> None:
        nonlocal sent
        handler.send_response(200)
        if says_how_long:
            handler.send_header("Content-Length", str(2**40))
        handler.end_headers()
        while True:
            sent += handler.wfile.write(bytes(2**16))

    host.answers["/flood"] = flood
    assert "more than 100,000 bytes" in refusal(host.visit(), host.url("/flood"), 100_000)
    assert sent < 64 * ONE_MIB


def test_all_pictures_of_a_request_share_a_limit(host: Host) -> None:
    """What the first has taken is not there for the second; another request begins anew."""
    host.answers |= {"/one": sends(bytes(60)), "/two": sends(bytes(60))}
    pictures = host.pictures(limits=RemoteLimits(max_bytes=100))
    visit = pictures.visit()
    assert visit.read(host.url("/one"), ONE_MIB) == bytes(60)
    assert "before it in the request" in refusal(visit, host.url("/two"))
    assert pictures.visit().read(host.url("/two"), ONE_MIB) == bytes(60)


@pytest.mark.parametrize("part", ["headers", "body"])
def test_a_host_that_drips_is_left(host: Host, part: str) -> None:
    """A byte now and then does not renew the time, neither in the head nor in the body."""
    ended = threading.Event()

    def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
        if part == "body":
            handler.send_response(200)
            handler.end_headers()
        else:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        while not ended.wait(0.05):
            handler.wfile.write(b"x")

    host.answers["/drip"] = drip
    started = time.monotonic()
    try:
        said = refusal(host.visit(limits=RemoteLimits(seconds=0.5)), host.url("/drip"))
    finally:
        ended.set()
    assert "took longer than 0.5 seconds" in said
    assert time.monotonic() - started < 60  # without a limit it would drip for good


def test_what_a_host_lets_others_keep_is_kept_so_long(host: Host) -> None:
    """For its max-age and no longer; without one, or with no-store, each request asks again."""
    clock = [0.0]
    host.answers |= {
        "/kept": sends(PICTURE, ("Cache-Control", "public, max-age=60")),
        "/never": sends(PICTURE, ("Cache-Control", "no-store, max-age=60")),
    }
    pictures = host.pictures(now=lambda: clock[0])
    for _ in range(2):
        for path in ("/kept", "/never", "/red.png"):
            assert pictures.visit().read(host.url(path), ONE_MIB) == PICTURE
    assert sorted(host.asked) == ["/kept", "/never", "/never", "/red.png", "/red.png"]
    clock[0] = 61.0
    pictures.visit().read(host.url("/kept"), ONE_MIB)
    assert host.asked.count("/kept") == 2


def test_what_is_there_now_is_what_is_seen(host: Host) -> None:
    """An address with another picture is another image; the same picture under another address is measured once."""
    reader = MeasuresImage()
    images = Images(reader, WORDS, remote=host.pictures())

    def digest() -> str:
        [image] = images.look(turn(user(host.url()))).images
        return image.facts.digest

    first = digest()
    host.answers["/again.png"] = sends(PICTURE)
    both = images.look(turn(user(host.url(), host.url("/again.png"))))
    assert [image.facts.digest for image in both.images] == [first]
    assert reader.num_calls == 1
    host.answers["/red.png"] = sends(encoded(Image.new("RGB", (8, 4), (0, 0, 255))))
    assert digest() != first
    assert both.images[0].load() == {"width": 8}, "an image is looked at again from the bytes of its own request"


def test_a_file_that_is_no_picture_is_refused(host: Host) -> None:
    """What comes from elsewhere is read by the same rules as what comes in the request."""
    host.answers["/red.png"] = sends(b"<svg/>")
    with pytest.raises(BadRequest, match="broken or not one of"):
        Images(MeasuresImage(), WORDS, remote=host.pictures()).look(turn(user(host.url())))


def test_nothing_is_fetched_unless_hosts_are_named(host: Host) -> None:
    """By default a remote address is refused; with hosts, paths and http still are."""
    with pytest.raises(BadRequest, match="IMAGE_HOSTS"):
        Images(MeasuresImage(), WORDS).look(turn(user(host.url())))
    images = Images(MeasuresImage(), WORDS, remote=host.pictures())
    for source in ("file:///etc/passwd", "/etc/passwd", f"http://{HOST}/red.png"):
        message = Message("user", (TextBlock("see"), ImageBlock(source)))
        with pytest.raises(BadRequest, match="opens no files"):
            images.look(turn(message))
    assert host.asked == []
