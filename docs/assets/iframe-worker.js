// Browsers refuse web workers on pages opened as files (file://). The search of the site needs one: run its script in a
// hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      this.queue = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      const base = new URL(url, location.href)
      inner.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => new Promise((resolve, reject) => {
          const script = inner.document.createElement("script")
          script.src = new URL(each, base)
          script.onload = resolve
          script.onerror = reject
          inner.document.body.append(script)
        })), Promise.resolve())
      inner.postMessage = data => this.deliver(this, data)
      inner.importScripts(base).then(() => {
        this.ready = true
        this.queue.splice(0).forEach(data => this.deliver(inner, data))
      })
    }

    deliver(target, data) {
      const event = new MessageEvent("message", { data })
      target.dispatchEvent(event)
      if (typeof target.onmessage === "function") target.onmessage(event)
    }

    postMessage(data) {
      if (this.ready) setTimeout(() => this.deliver(this.frame.contentWindow, data))
      else this.queue.push(data)
    }

    terminate() {
      this.frame.remove()
    }
  }
}
