"""The process node: runs bound Pods as processes, as a kubelet would run them as containers.

It replaces only the image. Every other field of a Pod is honoured or the Pod is refused with the field's path.
"""
