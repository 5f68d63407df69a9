"""Debian's chromium without a screen, driven by the Chrome DevTools protocol over a pair of pipes."""
import base64
import fcntl
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time

# The longest that an answer, or a page, may take.
SECONDS = 30

FLAGS = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--disable-smooth-scrolling", "--disable-background-networking", "--disable-component-update", "--no-first-run", "--mute-audio",
         # What a page's frames say, and what they ask for, is told with the page's own.
         "--disable-features=IsolateSandboxedIframes,Translate,MediaRouter"]


def find():
    """The path of chromium, which is installed where that is possible."""
    if not shutil.which("chromium") and shutil.which("apt-get") and os.geteuid() == 0:
        install = "apt-get install --yes --no-install-recommends chromium"
        command = f"({install} || (apt-get update && {install})) > /dev/null"
        subprocess.run(["sh", "-c", command], env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
    found = shutil.which("chromium")
    if not found:
        sys.exit("pages are tested in Debian's chromium, and there is none here: `apt-get install chromium` as root, or put a program "
                 "`chromium` on the PATH")
    return found


class Browser:
    """One tab. It has no network; `requests` and `complaints` have what the page asked for and what it said on the console."""

    def __init__(self):
        self.home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ends = [*os.pipe(), *os.pipe()]
        # Away from 3 and 4, to which the browser's ends are copied.
        its_in, self.to, self.answers, its_out = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
        for end in ends:
            os.close(end)
        self.log = open(pathlib.Path(self.home.name) / "log", "w+b")
        self.process = subprocess.Popen(
            [find(), *FLAGS, f"--user-data-dir={self.home.name}/profile", "about:blank"], close_fds=False,
            preexec_fn=lambda: (os.dup2(its_in, 3), os.dup2(its_out, 4)), stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        os.close(its_in)
        os.close(its_out)
        self.buffer, self.number, self.session, self.seen = b"", 0, None, []
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log", "Network", "DOM"]:
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.home.cleanup()

    def receive(self, until):
        """The next message; an event is kept."""
        while b"\0" not in self.buffer:
            if not select.select([self.answers], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing within {SECONDS} seconds")
            more = os.read(self.answers, 1 << 20)
            if not more:
                self.log.seek(0)
                sys.exit(f"the browser ended:\n{self.log.read().decode(errors='replace')[-2000:]}")
            self.buffer += more
        message, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(message)
        if "method" in message:
            self.seen.append(message)
        return message

    def call(self, method, **params):
        self.number += 1
        command = {"id": self.number, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.to, json.dumps(command).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            message = self.receive(until)
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description") or result["exceptionDetails"]["text"])
        return result["result"].get("value")

    def open(self, path, width, scheme):
        """Opens a file on a screen that is as high as the page."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.resize(width, 900)
        self.seen.clear()
        self.call("Page.navigate", url=path.as_uri())
        until = time.monotonic() + SECONDS
        while not any(event["method"] == "Page.loadEventFired" for event in self.seen):
            self.receive(until)
        self.resize(width, max(300, self.run("document.documentElement.scrollHeight")))
        # Once it is drawn, its observers have run.
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def complaints(self, page):
        """What went wrong since the page was opened: errors on the console, and requests for anything but the page."""
        for event in self.seen:
            params = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    details = params["exceptionDetails"]
                    yield f"a script failed: {details.get('exception', {}).get('description', details['text'])}"
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    yield f"the console has: {params['args'][0].get('value', params['type'])}"
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    yield f"the console has: {params['entry']['text']}"
                case "Network.requestWillBeSent":
                    url = params["request"]["url"]
                    if url != page.as_uri() and not url.startswith(("data:", "about:")):
                        yield f"it asks for {url}"

    def press(self, key):
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def picture(self, width, height):
        taken = self.call("Page.captureScreenshot", format="png", clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})
        return base64.b64decode(taken["data"])
