"""A server of completions that answers by a script."""

import http.server
import json
import threading
import time


class Server(http.server.ThreadingHTTPServer):
    """Answers each request with the next step of `script`, and after its end with the text of `reply`.

    A step is a status, (status, headers), (status, headers, body), bytes that are the whole content, or "cut" (the
    connection ends in the middle of an answer). `seen`: the bodies of all requests; `most`: the most at the same time.
    """

    daemon_threads = True
    request_queue_size = 128  # with 5, a busy machine resets connections that come at the same time

    def __init__(self, reply=lambda body: {"text": "!"}, script=(), delay=0.0, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.reply, self.script, self.delay, self.usage = reply, list(script), delay, None
        self.seen, self.paths, self.headers, self.times = [], [], [], []
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_) -> None:
        """A client that has gone is no news."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append(body)
            server.paths.append(self.path)
            server.headers.append(dict(self.headers))
            server.times.append(time.monotonic())
            server.now += 1
            server.most = max(server.most, server.now)
            step = server.script.pop(0) if server.script else None
        time.sleep(server.delay)
        with server.lock:
            server.now -= 1
        answer = {"choices": [server.reply(body)]} | ({"usage": server.usage} if server.usage else {})
        data = step if isinstance(step, bytes) else json.dumps(answer).encode()
        status, headers, error = (*step, {}, b"")[:3] if isinstance(step, tuple) else (step, {}, b"")
        if isinstance(status, int):
            data = error or json.dumps({"error": {"message": f"no: {self.headers['Authorization']}"}}).encode()
        self.send_response(status if isinstance(status, int) else 200)
        for name, value in headers.items() if isinstance(headers, dict) else ():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if step == "cut" else data)

    def log_message(self, format, *args):
        pass
