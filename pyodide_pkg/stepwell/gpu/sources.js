// Byte sources: { name, size, read(from, to) -> Uint8Array, stream(from, to) -> ReadableStream }.

// Reads a ReadableStream as exact runs of bytes.
class ByteStream {
  constructor(stream, position, name) {
    this.reader = stream.getReader();
    this.position = position;
    this.name = name;
    this.rest = new Uint8Array(0);
  }

  async more() {
    if (this.rest.length) return;
    const { value, done } = await this.reader.read();
    if (done) throw failed("BadFile", `${this.name}: the file ends at byte ${this.position}`);
    this.rest = value;
  }

  take(nbytes) {
    const piece = this.rest.subarray(0, nbytes);
    this.rest = this.rest.subarray(piece.length);
    this.position += piece.length;
    return piece;
  }

  async skipTo(offset) {
    while (this.position < offset) {
      await this.more();
      this.take(offset - this.position);
    }
  }

  async fill(target, nbytes) {
    for (let have = 0; have < nbytes;) {
      await this.more();
      const piece = this.take(nbytes - have);
      target.set(piece, have);
      have += piece.length;
    }
  }

  async close() {
    await this.reader.cancel().catch(() => {});
  }
}

async function urlSource(url, name) {
  const get = async (headers) => {
    let response;
    try {
      response = await fetch(url, { headers });
    } catch (error) {
      throw failed("BadFile", `${name}: cannot be fetched from ${url}: ${error.message}`);
    }
    if (!response.ok) throw failed("BadFile", `${name}: the server answered ${response.status} for ${url}`);
    return response;
  };
  const probe = await get({ Range: "bytes=0-0" });
  await probe.body?.cancel();
  const ranged = probe.status === 206;
  const size = Number(ranged ? probe.headers.get("Content-Range")?.split("/")[1] : probe.headers.get("Content-Length"));
  if (!(size > 0)) throw failed("BadFile", `${name}: the server does not say how long ${url} is`);
  const stream = async (from, to) => {
    if (ranged) return (await get({ Range: `bytes=${from}-${to - 1}` })).body;
    const { body } = await get({}); // no ranges: read from the start and drop what comes before
    let skip = from;
    return body.pipeThrough(new TransformStream({
      transform(piece, controller) {
        const drop = Math.min(skip, piece.length);
        skip -= drop;
        if (drop < piece.length) controller.enqueue(piece.subarray(drop));
      },
    }));
  };
  const read = async (from, to) => {
    const end = Math.min(to, size);
    const bytes = new ByteStream(await stream(from, end), from, name);
    const target = new Uint8Array(end - from);
    await bytes.fill(target, target.length);
    await bytes.close();
    return target;
  };
  return { name, size, read, stream };
}

function fileSource(file) {
  return {
    name: file.name,
    size: file.size,
    read: async (from, to) => new Uint8Array(await file.slice(from, to).arrayBuffer()),
    stream: async (from, to) => file.slice(from, to).stream(),
  };
}

async function opfsSource(path) {
  const parts = path.split("/").filter(Boolean);
  try {
    let folder = await navigator.storage.getDirectory();
    for (const part of parts.slice(0, -1)) folder = await folder.getDirectoryHandle(part);
    return fileSource(await (await folder.getFileHandle(parts.at(-1))).getFile());
  } catch (error) {
    throw failed("BadFile", `${path}: not in the origin's private file system: ${error.message}`);
  }
}
