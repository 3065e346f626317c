{{- /*
All take the values of this chart as `.`, that is `.Values.kvwatch` of a chart that has it as a dependency with that alias.

  spec.initContainers         {{ include "kvwatch-sidecar.container" .Values.kvwatch | nindent N }}
  spec.volumes                {{ include "kvwatch-sidecar.volumes" .Values.kvwatch | nindent N }}
  the engine's volumeMounts   {{ include "kvwatch-sidecar.engineMounts" .Values.kvwatch | nindent N }}
  the engine's args           {{ include "kvwatch-sidecar.engineArgs" .Values.kvwatch | nindent N }}
  the pod's labels            {{ include "kvwatch-sidecar.podLabels" .Values.kvwatch | nindent N }}
*/}}

{{- /* "tcp" or "ipc". */}}
{{- define "kvwatch-sidecar.transport" -}}
{{- $several := gt (int .engine.ranks) 1 }}
{{- if and $several (eq .engine.transport "ipc") }}{{ fail "engine.transport ipc has no port to tell ranks apart; take tcp" }}{{ end }}
{{- if or (eq .engine.transport "tcp") $several }}tcp{{ else }}ipc{{ end }}
{{- end }}

{{- define "kvwatch-sidecar.events" -}}
{{- if eq (include "kvwatch-sidecar.transport" .) "tcp" }}tcp://127.0.0.1:{{ .ports.events }}{{ else }}ipc:///run/kvwatch/events.sock{{ end }}
{{- end }}

{{- define "kvwatch-sidecar.replay" -}}
{{- if eq (include "kvwatch-sidecar.transport" .) "tcp" }}tcp://127.0.0.1:{{ .ports.replay }}{{ else }}ipc:///run/kvwatch/replay.sock{{ end }}
{{- end }}

{{- /* An address without a wildcard makes the engine connect, so over tcp:// the sidecar binds. */}}
{{- define "kvwatch-sidecar.url" -}}
{{ .engine.name }}={{ .engine.kind }}+http://127.0.0.1:{{ .engine.port }}?kv_events={{ include "kvwatch-sidecar.events" . }}&replay={{ include "kvwatch-sidecar.replay" . }}
{{- if eq (include "kvwatch-sidecar.transport" .) "tcp" }}&mode=bind&dp_ranks={{ .engine.ranks }}{{ end }}
{{- if .engine.tokenSecret.name }}&token_file=/run/secrets/kvwatch/{{ .engine.tokenSecret.key }}{{ end }}
{{- end }}

{{- define "kvwatch-sidecar.flags" -}}
{{- range $name, $value := . }}
{{- $flag := $name | replace "_" "-" }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $flag }}
{{- else if and (kindIs "float64" $value) (eq (floor $value) $value) }}
- --{{ $flag }}={{ int64 $value }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /*
No probes, on purpose: Kubernetes counts a sidecar that is not ready against its pod, and a failed probe would take a model
that serves well out of service. Whether the sidecar works is asked of its metrics.
*/}}
{{- define "kvwatch-sidecar.container" -}}
- name: kvwatch
  restartPolicy: Always # what makes an init container a sidecar: started before the engine, ended after it
  image: {{ with .image }}{{ if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag }}{{ end }}{{ end }}
  imagePullPolicy: {{ .image.pullPolicy }}
  args:
    - sidecar
    - {{ printf "--engine=%s" (include "kvwatch-sidecar.url" .) | quote }}
    - --metrics-listen=0.0.0.0:{{ .ports.metrics }}
    - --cache-dir=/var/cache/kvwatch
    - --log-format=json
    {{- with include "kvwatch-sidecar.flags" .settings | trim }}{{ . | nindent 4 }}{{ end }}
  ports:
    - {name: kvwatch, containerPort: {{ .ports.metrics }}}
  resources:
    requests: {{- toYaml .resources | nindent 6 }}
    limits: {{- toYaml .resources | nindent 6 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ .runAsUser }}
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL]}
    seccompProfile: {type: RuntimeDefault}
  volumeMounts:
    - {name: kvwatch-run, mountPath: /run/kvwatch}
    - {name: kvwatch-cache, mountPath: /var/cache/kvwatch}
    {{- if .engine.tokenSecret.name }}
    - {name: kvwatch-token, mountPath: /run/secrets/kvwatch, readOnly: true}
    {{- end }}
{{- end }}

{{- define "kvwatch-sidecar.volumes" -}}
- {name: kvwatch-run, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
- {name: kvwatch-cache, emptyDir: {sizeLimit: 256Mi}}
{{- if .engine.tokenSecret.name }}
- name: kvwatch-token
  secret:
    secretName: {{ .engine.tokenSecret.name }}
    items: [{key: {{ .engine.tokenSecret.key }}, path: {{ .engine.tokenSecret.key }}}]
{{- end }}
{{- end }}

{{- define "kvwatch-sidecar.engineMounts" -}}
- {name: kvwatch-run, mountPath: /run/kvwatch}
{{- end }}

{{- define "kvwatch-sidecar.engineArgs" -}}
{{- $config := dict "publisher" "zmq" "endpoint" (include "kvwatch-sidecar.events" .) "replay_endpoint" (include "kvwatch-sidecar.replay" .) }}
{{- if eq .engine.kind "vllm" }}{{ $_ := set $config "enable_kv_cache_events" true }}{{ end }}
- --kv-events-config
- {{ $config | toJson | quote }}
{{- end }}

{{- define "kvwatch-sidecar.podLabels" -}}
kvwatch.io/job: kvwatch-sidecar
{{- end }}
