"""The page of labels, in a process of its own."""

import http.client
import json
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def serving(*words):
    """A real `operant label` in a process of its own, and the address that it prints."""
    command = [sys.executable, "-m", "operant", "label", *map(str, words), "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def post(url, path, **body):
    base, _, token = url.partition("#")
    host = base.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(host, timeout=20)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", "Origin": f"http://{host}"}
    try:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
