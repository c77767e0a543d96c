{{/* What the chart itself gives to the gateway's pod. `extra*` is laid beside it; _validation.tpl refuses what would be there twice. */}}
{{- define "medusa-gateway.fetchEnv" -}}
{{ include "medusa-gateway.cacheEnv" . }}
{{- with .Values.model.hubTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "medusa-gateway.gatewayEnv" -}}
{{ include "medusa-gateway.cacheEnv" . }}
{{- if .Values.model.fetch }}
{{- /* All there is to load was brought by the init container. */}}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if and (not .Values.gpu.enabled) (dig "requests" "cpu" "" .Values.resources) }}
{{- /* As many compute threads as cores are this pod's own; more would wait for each other. */}}
- name: OMP_NUM_THREADS
  valueFrom:
    resourceFieldRef: {containerName: gateway, resource: requests.cpu}
{{- end }}
{{- with include "medusa-gateway.redisEnv" . | trim }}
{{ . }}
{{- end }}
{{- with .Values.telemetry }}
{{- if .otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .otlpEndpoint | quote }}}
- {name: OTEL_EXPORTER_OTLP_PROTOCOL, value: {{ .otlpProtocol | quote }}}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
{{- end }}
{{- end }}
{{- end }}

{{/* Where the traces are from. Last in the list, since $(POD_NAME) must stand before it. The operator's attributes are added. */}}
{{- define "medusa-gateway.resourceAttributes" -}}
{{- $attributes := "" -}}
{{- $referred := false -}}
{{- if .Values.telemetry.otlpEndpoint }}{{ $attributes = printf "k8s.namespace.name=%s,k8s.pod.name=$(POD_NAME)" .Release.Namespace }}{{ end -}}
{{- range .Values.extraEnv }}
{{- if eq .name "OTEL_RESOURCE_ATTRIBUTES" }}
{{- if .valueFrom }}{{ $referred = true }}{{ else }}{{ $attributes = list $attributes .value | compact | join "," }}{{ end }}
{{- end }}
{{- end }}
{{- if and $attributes (not $referred) }}{{ $attributes }}{{ end }}
{{- end }}

{{- define "medusa-gateway.gatewayMounts" -}}
{{ include "medusa-gateway.modelMounts" . }}
{{- /* A folder and not a subPath: only so do edits of the ConfigMap reach a running gateway. */}}
- {name: policy, mountPath: /etc/medusa-gateway/policy, readOnly: true}
{{- if ne .Values.auth.mode "none" }}
- {name: keys, mountPath: /etc/medusa-gateway/keys, readOnly: true}
{{- end }}
{{- if include "medusa-gateway.redisCa" . }}
- {name: redis-ca, mountPath: /etc/medusa-gateway/redis-ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "medusa-gateway.volumes" -}}
- name: cache
  {{- if eq .Values.cache.type "persistentVolumeClaim" }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-cache" (include "medusa-gateway.fullname" .)) .Values.cache.existingClaim | quote }}
  {{- else if eq .Values.cache.type "hostPath" }}
  hostPath: {path: {{ .Values.cache.hostPath | quote }}, type: Directory}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.cache.size | quote }}}
  {{- end }}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- with .Values.model.volume }}
{{- if .existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .existingClaim | quote }}, readOnly: true}
{{- else if .hostPath }}
- name: models
  hostPath: {path: {{ .hostPath | quote }}, type: Directory}
{{- end }}
{{- end }}
- name: policy
  configMap: {name: {{ include "medusa-gateway.policyConfigMap" . | quote }}}
{{- if ne .Values.auth.mode "none" }}
- name: keys
  secret:
    secretName: {{ include "medusa-gateway.keysSecret" . | quote }}
    {{- /* The digests only: a generated key lies beside them, and is no business of the gateway's. */}}
    items: [{key: {{ include "medusa-gateway.keysFile" . | quote }}, path: {{ include "medusa-gateway.keysFile" . | quote }}}]
{{- end }}
{{- with include "medusa-gateway.backendsConfigMap" . }}
- name: backends
  configMap: {name: {{ . | quote }}}
{{- end }}
{{- with include "medusa-gateway.redisCa" . }}
- name: redis-ca
  secret: {secretName: {{ . | quote }}}
{{- end }}
{{- end }}
