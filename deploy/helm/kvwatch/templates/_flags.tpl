{{- /* A list of flags from a map of settings. Numbers come as floats: whole ones must not become 1e+06. */}}
{{- define "kvwatch.flags" -}}
{{- range $name, $value := . }}
{{- $flag := $name | replace "_" "-" }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $flag }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $flag . | quote }}
{{- end }}
{{- else if and (kindIs "float64" $value) (eq (floor $value) $value) }}
- --{{ $flag }}={{ int64 $value }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%v" $flag $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvwatch.ownFlags" -}}
- --host=0.0.0.0
- --port=8000
- --metrics-listen=0.0.0.0:9400
- --admin-listen={{ if .Values.admin.expose }}0.0.0.0{{ else }}127.0.0.1{{ end }}:9401
- --grpc-listen={{ if .Values.grpc.expose }}0.0.0.0{{ else }}127.0.0.1{{ end }}:9402
- --engine-name=$(POD_NAME)
- --cache-dir=/var/cache/kvwatch
- --drain-seconds={{ .Values.drainSeconds }}
- --log-format=json
{{- if .Values.apiKeys.secretName }}
- --api-key-file=/run/secrets/kvwatch/api/{{ .Values.apiKeys.key }}
{{- end }}
{{- if .Values.admin.secretName }}
- --admin-token-file=/run/secrets/kvwatch/admin/{{ .Values.admin.key }}
{{- end }}
{{- if .Values.admin.expose }}
{{- $pod := printf "$(POD_NAME).%s-pods" (include "kvwatch.fullname" .) }}
- --admin-hosts={{ $pod }},{{ $pod }}.{{ .Release.Namespace }}.svc,{{ $pod }}.{{ .Release.Namespace }}.svc.cluster.local
{{- end }}
{{- if .Values.grpc.secretName }}
- --grpc-token-file=/run/secrets/kvwatch/grpc/{{ .Values.grpc.key }}
{{- end }}
{{- end }}

{{- define "kvwatch.check" -}}
{{- if and .Values.admin.expose (not .Values.admin.secretName) }}
{{- fail "admin.expose needs admin.secretName: off loopback the admin API asks everybody for a token" }}
{{- end }}
{{- if and .Values.grpc.expose (not .Values.grpc.secretName) }}
{{- fail "grpc.expose needs grpc.secretName: off loopback the event stream asks everybody for a token" }}
{{- end }}
{{- end }}
