"""A device and a cloud on 127.0.0.1: the device sends features over HTTP, and no image leaves it.

    splitveil train recipes/cem_small_fashion.toml --name first
    python examples/serve.py runs/first

Here both are in one process; in service the device has `model.edge` and `channel`, the cloud has `model.cloud`. A message holds
the numbers of z and nothing else, as safetensors: nobody unpickles what came over the wire. HTTP is not encrypted. Put TLS around
it, but remember that splitveil protects from whoever reads z, so also from the cloud itself.
"""

import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

import splitveil
from splitveil.data.readers.fashion import fashion

LARGEST = 2**24
"""Bytes of a message, at most."""


def cloud_server(model: splitveil.SplitModel) -> HTTPServer:
    """Answers POST with the logits of the z that was sent."""

    class Cloud(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                z = self.features()
            except (SafetensorError, ValueError, KeyError) as error:
                self.send_error(400, explain=str(error))
                return
            with torch.inference_mode():
                answer = save({"logits": model.cloud(z)})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def features(self) -> torch.Tensor:
            length = int(self.headers.get("Content-Length", 0))
            if not 0 < length <= LARGEST:
                raise ValueError(f"the message has {length} bytes, must have 1 to {LARGEST}")
            z = load(self.rfile.read(length))["z"]
            if z.shape[1:] != model.z_shape or z.dtype != torch.float32 or not z.isfinite().all():
                raise ValueError(f"z is {z.dtype} {list(z.shape)}, must be finite float32 {['n', *model.z_shape]}")
            return z

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a log of requests is one more store of who sent what."""

    return HTTPServer(("127.0.0.1", 0), Cloud)


def main(run: str = "runs/first", images: int = 256) -> None:
    model, channel, classes = splitveil.load(run, "cpu")
    channel.serve()  # once on the device: from here on the noise is secret and made ahead of time
    test = fashion().test
    assert test is not None
    x, y = torch.from_numpy(test.images[:images]).float() / 255, torch.from_numpy(test.labels[:images])
    right = sent = 0
    with cloud_server(model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for some, labels in zip(x.split(64), y.split(64)):
            with torch.inference_mode():
                body = save({"z": channel.send(model.edge(some), some).contiguous()})
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", data=body) as answer:
                guess = load(answer.read())["logits"].argmax(1)
            if not sent:
                print(f"the cloud takes the first image for: {classes[guess[0]]}")
            right, sent = right + int((guess == labels).sum()), sent + len(body)
        server.shutdown()
    print(f"accuracy {right / len(x):.3f} over the wire, {sent / len(x):,.0f} bytes an image")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/first")
