"""Volumes of a Pod manifest: emptyDir, generic ephemeral, configMap, secret, downwardAPI and projected; all else is
refused. No I/O."""

from paceline_cli.node.fields import Fields
from paceline_cli.node.pod import PodRefused, Volume, VolumeItem, VolumeSourceSpec

_KINDS = ("configMap", "secret", "downwardAPI", "serviceAccountToken")


def parse_volume(fields: Fields) -> Volume:
    """Raises PodRefused for a kind of volume that this node cannot fill."""
    name = fields.text("name")
    for key in ("hostPath", "persistentVolumeClaim"):
        if fields.has(key):
            raise PodRefused(f"{fields.path}.{key}", "not honoured by a process node")
    if fields.has("ephemeral"):
        return _ephemeral(fields, name)
    # `emptyDir: {}` is the usual form, so presence counts here, not content.
    kinds = [k for k in (*_KINDS[:3], "projected") if fields.has(k)]
    if not kinds:
        return _empty_dir(fields, name)
    inner = fields.child(kinds[0])
    if kinds[0] == "projected":
        mode = inner.integer("defaultMode", 0o644)
        sources = tuple(_projected(s) for s in inner.children("sources"))
    else:
        mode = inner.integer("defaultMode", 0o644)
        # A plain secret volume says secretName where everything else says name.
        ref = inner.text("secretName") if kinds[0] == "secret" else ""
        sources = (_source(inner, kinds[0], ref),)
    inner.done()
    fields.done()
    return Volume(name, "files", sources, mode)


def _empty_dir(fields: Fields, name: str) -> Volume:
    inner = fields.child("emptyDir")
    inner.only("medium", "", "Memory")
    volume = Volume(
        name,
        "emptyDir",
        memory=inner.text("medium") == "Memory",
        size_limit=str(inner.raw("sizeLimit", "")),
    )
    inner.done()
    fields.done()
    return volume


def _ephemeral(fields: Fields, name: str) -> Volume:
    """A claim of the pod's own: a folder here, bounded by the claim's size. Storage classes are the cluster's."""
    inner = fields.child("ephemeral")
    template = inner.child("volumeClaimTemplate")
    template.accept("metadata")
    spec = template.child("spec")
    spec.accept("storageClassName", "accessModes")
    spec.only("volumeMode", "Filesystem")
    resources = spec.child("resources")
    size = resources.texts("requests").get("storage", "")
    for part in (resources, spec, template, inner, fields):
        part.done()
    return Volume(name, "emptyDir", size_limit=size)


def _projected(fields: Fields) -> VolumeSourceSpec:
    for kind in _KINDS:
        if fields.has(kind):
            inner = fields.child(kind)
            source = _source(inner, kind, "")
            inner.done()
            fields.done()
            return source
    fields.done()
    raise PodRefused(fields.path, "must have one of " + ", ".join(_KINDS))


def _source(fields: Fields, kind: str, ref: str) -> VolumeSourceSpec:
    if kind == "serviceAccountToken":
        return VolumeSourceSpec(
            kind,
            items=(VolumeItem("", _relative(fields, "path")),),
            audience=fields.text("audience"),
            expiration=fields.integer("expirationSeconds", 3600),
        )
    items = tuple(_item(item, kind) for item in fields.children("items"))
    if kind == "downwardAPI":
        return VolumeSourceSpec(kind, items=items)
    return VolumeSourceSpec(kind, ref or fields.text("name"), items, fields.flag("optional"))


def _item(fields: Fields, kind: str) -> VolumeItem:
    path, mode = _relative(fields, "path"), fields.integer_or_none("mode")
    if kind != "downwardAPI":
        item = VolumeItem(fields.text("key"), path, mode)
    elif fields.has("fieldRef"):
        ref = fields.child("fieldRef")
        ref.only("apiVersion", "v1")
        item = VolumeItem(ref.text("fieldPath"), path, mode, "field")
        ref.done()
    else:
        ref = fields.child("resourceFieldRef")
        ref.only("divisor", "1", "0", 1, 0)
        item = VolumeItem(f"{ref.text('containerName')}/{ref.text('resource')}", path, mode, "resource")
        ref.done()
    fields.done()
    return item


def _relative(fields: Fields, key: str) -> str:
    path = fields.text(key)
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise PodRefused(f"{fields.path}.{key}", "must be a relative path without ..")
    return path
