// SPDX-License-Identifier: Apache-2.0
// A browser starts no worker for a page that is opened as a file. There, the search runs in a frame without a window instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.__index = window.__index;
      inner.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.load(new URL(url, location.href).href).then(() => {
        this.waiting.forEach((data) => this.postMessage(data));
        this.waiting = null;
      });
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        this.frame.contentDocument.body.append(script);
      });
    }

    // What the page tells the worker: an event of the frame's own, which its script listens for.
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
