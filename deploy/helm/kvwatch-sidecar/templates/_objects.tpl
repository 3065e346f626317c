{{- /*
Objects beside the pod. They take a dictionary: `values` as above, `name`, `selector` (the pod's labels) and `from`
(of the network policy: who may reach the API and the metrics; empty for everybody).
*/}}
{{- define "kvwatch-sidecar.podMonitor" -}}
{{- if .values.podMonitor.enabled }}
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: {{ .name }}
  {{- with .values.podMonitor.labels }}
  labels: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  jobLabel: kvwatch.io/job # job="kvwatch-sidecar", which dashboards and alerts look for
  selector:
    matchLabels: {{- toYaml .selector | nindent 6 }}
  podMetricsEndpoints:
    - port: kvwatch
      interval: {{ .values.podMonitor.interval }}
      filterRunning: true
{{- end }}
{{- end }}

{{- /* Whatever an engine binds without saying where must not be reached from outside. */}}
{{- define "kvwatch-sidecar.networkPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .name }}
spec:
  podSelector:
    matchLabels: {{- toYaml .selector | nindent 6 }}
  policyTypes: [Ingress]
  ingress: # everything else is denied, the ports of the events among it
    - ports:
        - {protocol: TCP, port: {{ .values.engine.port }}}
        - {protocol: TCP, port: {{ .values.ports.metrics }}}
      {{- with .from }}
      from: {{- toYaml . | nindent 8 }}
      {{- end }}
{{- end }}
